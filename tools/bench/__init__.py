"""``pager bench``: pager and its peers side by side, each in a process of its own (see `command`)."""
