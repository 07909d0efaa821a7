"""Images, sound and video in rows: decoding, and tokens of rows with media."""
