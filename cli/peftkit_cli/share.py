"""`peftkit merge`: an adapter folded into its base."""
