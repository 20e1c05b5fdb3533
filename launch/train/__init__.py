"""The demonstration job: train a small language model on real text with the sequence split over
ranks, and measure a checkpoint.
"""
