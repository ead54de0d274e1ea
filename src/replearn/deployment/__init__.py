"""Turn a replaced model into an ordinary one: deploy, merge, export, quantize."""
