"""The processes of a run as bench/async.py starts them: pinned to a core each, answers cut at drawn lengths."""
