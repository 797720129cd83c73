"""Tests: flat test_<module>.py files here; integration/ needs models, browser/ needs Chromium."""
