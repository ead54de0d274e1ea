"""The report room: result files in, a page, its figures and a live view out. Nothing here changes a run."""
