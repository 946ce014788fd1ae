"""These tests run in Triton's interpreter: test_kernel_processes.py starts them; by hand, set TRITON_INTERPRET=1."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
