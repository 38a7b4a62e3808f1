"""`verify-parallel`: layouts against one process, on a user's own model and rows."""
