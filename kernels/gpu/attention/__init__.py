"""Paged attention: split over positions for decoding and draft trees, tiled for prefill."""
