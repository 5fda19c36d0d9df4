import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never wait for a network
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
