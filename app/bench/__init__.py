"""What `parley bench` measures."""
