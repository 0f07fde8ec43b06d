"""Handle untrusted input and text for terminals: decode with limits, check, escape.

Reading order: decoding, images → odd_text → printable → terminal → secret_values → error_text.
"""
