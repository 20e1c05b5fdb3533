"""Language models on real text with the sequence split over ranks: train a small one, or fine-tune
one of transformers; measure; export.
"""
