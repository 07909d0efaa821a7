"""The methods: one file each, all behind the same protocol."""
