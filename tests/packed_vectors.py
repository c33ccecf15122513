"""Words and roundings worked out beforehand, which every implementation has to give."""

import numpy as np


def _hex(text):
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


# Old word, m, v, random numbers for m and v; then both kinds of words.
OLD, M, V, FOR_M, FOR_V, MVH, MV = _hex("""
    00000000 3F800000 3F800000 00000000 00000000 3F840160 3F800B00
    00000000 3F800000 3F800000 FFFFFFFF FFFFFFFF 3F840161 3F800B01
    00000000 BE99999A 40001062 12345678 9ABCDEF0 C00C0106 C0001834
    3F900000 3C23D70A 3F333333 80000000 80000000 3F92CC8B 3F333458
    40080000 80000000 00000000 7FFFFFFF 7FFFFFFF C0080000 80000000
    00000000 58635FA9 6C4ECB8F 40000000 C0000000 6C5677F9 6C4EDFC7
    00000000 29E12E13 0F4AD2F8 40000000 C0000000 0F5659F8 0F4ADFC2
    3F800000 42C80000 3F800000 00000000 00000000 3F8401FF 3F800FFF
    00000000 00000000 00000000 FFFFFFFF FFFFFFFF 00000000 00000000
""").reshape(-1, 7).T  # fmt: skip

# Word, whether it has a running maximum, m, v.
DECODED = [
    (0xC00C0106, True, -0.295898438, 2.0),
    (0x3F92CC8B, True, 0.0100097656, 0.69921875),
    (0xC0001834, False, -0.299804688, 2.00097656),
]

# Gradients of each step with betas (0.5, 0.75), for which all arithmetic is exact, seed 1, salt 0;
# then the words of both kinds.
STEP_OPTIONS = {"betas": (0.5, 0.75), "seed": 1, "state_dtype": "packed32"}
STEPS = [
    ([1.0, -0.5, 0.25, 0.0], "3E840160 BD840160 3C840160 00000000",
     "3E800B00 BD800B00 3C800B00 00000000"),
    ([0.75, -0.25, 4.0, 0.0], "3EAD4168 BD840160 408C0561 00000000",
     "3EA80B40 BD800B00 40806B08 00000000"),
    ([0.0, 0.5, -0.125, 0.0], "3EABF148 3DE70140 408B053E 00000000",
     "3E7C0A40 3DE00A01 4040D9F0 00000000"),
    ([-1.0, 0.0, 0.0, 0.0], "BEE6F54C 3DE54120 408A431E 00000000",
     "BEDE8A60 3DA80902 401098F1 00000000"),
]  # fmt: skip
STEPS = [(grads, _hex(mvh), _hex(mv)) for grads, mvh, mv in STEPS]

HASHES = {0: 0, 1: 0x688990C0, 0xDEADBEEF: 0xE628C683}
KEYS = {(0, 1): 0x01FCE552, (0, 2): 0x04F8D29E, (7, 1): 0xA715B186}  # of seed and step
# For v, m and x of the first elements with the last of those keys.
DRAWS = _hex("""
    3E6EC269 672D00EF BD6A84D1
    7DED3C69 60F8F6EF A1400ED1
    EAAB238D 2F1D212B B8F29B95
    01F8D58D B1FB1F2B AEE81D95
""").reshape(-1, 3).T  # fmt: skip

# A float32, the upper half of its random number, the bfloat16.
STOCHASTIC = _hex("""
    3F8020C5 DF3A 3F80
    3F8020C5 DF3B 3F81
    BF8020C5 FFFF BF81
    7F7FC99E FFFF 7F80
    7F800000 FFFF 7F80
    80000000 FFFF 8000
    7FFFFFFF FFFF 7FC0
""").reshape(-1, 3).T  # fmt: skip
# A float32, its bfloat16, its lower half.
SPLIT = _hex("""
    3F807FFF 3F80 7FFF
    3F808000 3F81 8000
    3F818000 3F82 8000
    00008000 0001 8000
    8000FFFF 8001 FFFF
    7F7FFFFF 7F80 FFFF
    7FFFFFFF 7FC0 0000
""").reshape(-1, 3).T  # fmt: skip
