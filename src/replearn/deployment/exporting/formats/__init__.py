"""The formats: one file each, and this folder is their list.

A format is a file with SUFFIX, TOLERANCE (None: rounding in the outputs' dtype), `write(job, path)` and
`read(job, path)`, which gives back something to run on `Inputs`. To add one, add a file.
"""
