"""``pager monitor``: a run while it trains, and what its waveform says."""
