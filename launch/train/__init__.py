"""Language models on real text, the sequence split over ranks: train, measure, export.

A small model is trained, or one of transformers is fine-tuned.
"""
