"""`burst-rt generate`: text from a trained model, its cache of keys and values over the ranks."""
