"""What lies on disk: readers of every checkpoint layout, and the converter between them."""
