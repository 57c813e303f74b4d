"""What `admin.py` measures."""
