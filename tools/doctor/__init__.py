"""``pager doctor``: what of the machine makes paging fast or slow, checked line by line."""
