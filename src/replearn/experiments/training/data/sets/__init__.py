"""The data sets: every `Source` that a file of this folder holds. To add data sets, add a file."""
