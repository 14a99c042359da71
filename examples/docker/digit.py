"""Reads a handwritten digit with the LSTM of examples/01_digits.py, where module files run and nothing is compiled.

Exits with 1 where the scores are not those that PyTorch had of this image, which are kept beside the weights.
"""

import numpy as np
from safetensors.numpy import load_file

import ecornn

NUMBER = 4  # of the image among those of the test
IMAGE = """
    02ddb900
    0agggfa0
    0bg90000
    03fg8000
    002be000
    0008g000
    001bb000
    01gf4000
"""  # a row of pixels is a step, from 0 for white to g, 16, for black

tensors = load_file("digits_lstm.safetensors")
layer = ecornn.load("digits.so").bind("digits_lstm.safetensors", threads=1)
x = np.array([[int(pixel, 17) for pixel in row] for row in IMAGE.split()], np.float32).reshape(8, 1, 8) / 16

y, _ = layer(x)
scores = y[-1, 0] @ tensors["classifier.weight"].T + tensors["classifier.bias"]
wanted = tensors["test.logits"][NUMBER]
error = np.linalg.norm(scores - wanted) / np.linalg.norm(wanted)
print(f"a {scores.argmax()}; relative difference of the scores from PyTorch's {error:.1e}")
raise SystemExit(int(error > 1e-5))
