"""What make-model is made of: a byte-level tokenizer and random weights in the hub's layout."""
