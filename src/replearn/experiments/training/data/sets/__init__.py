"""The data sets: one file each, and this folder is their list.

A data set is a file with a `SOURCE` and a function `load(root, strict_counts)`. To add one, add a file.
"""
