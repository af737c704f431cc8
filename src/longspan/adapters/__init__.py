"""The only place that imports transformers: families, configs, live models, loading."""
