"""Our own users of the library: training, recipes, benchmarks, reports."""
