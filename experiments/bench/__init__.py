"""Parts of the benchmark: work, engines, measurement, figures."""
