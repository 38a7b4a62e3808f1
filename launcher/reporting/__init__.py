"""What the command `report` is made of: the summary of a run and its page."""
