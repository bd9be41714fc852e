"""quartz::sample as plain loops over integers and NumPy floats: the formulas of docs/ops/sample.md, nothing shared."""

import math

import numpy as np

F = np.float32
LARGEST = np.finfo(np.float32).max
MASK32 = 0xFFFFFFFF


def fma(a, b, c):
    """Return a * b + c rounded once: exact in 113 bits of integers, since binary32 products are exact in binary64."""
    a, b, c = float(a), float(b), float(c)
    product = a * b  # exact
    total = product + c
    # Round to odd in binary64, so that rounding to binary32 afterwards is the single rounding.
    if math.isfinite(total) and total != 0:
        high = total - product
        error = (product - (total - high)) + (c - high)
        if error != 0.0 and (np.float64(total).view(np.int64) & 1) == 0:
            total = float(np.nextafter(total, math.inf if error > 0 else -math.inf))
    return F(total)


def bits(x):
    return int(F(x).view(np.uint32))


def from_bits(x):
    return np.uint32(x & MASK32).view(np.float32)


LN2_HIGH, LN2_LOW, LOG2E = (
    F(float.fromhex("0x1.62e4p-1")),
    F(float.fromhex("0x1.7f7d1cp-20")),
    F(float.fromhex("0x1.715476p+0")),
)
EXP = [
    F(float.fromhex(c))
    for c in ("0x1.9f0884p-13", "0x1.6d8d52p-10", "0x1.111272p-7", "0x1.55548ep-5", "0x1.555554p-3", "0x1p-1")
]
LOG = [
    F(float.fromhex(c))
    for c in (
        "0x1.1457e4p-4",
        "-0x1.de3bf6p-4",
        "0x1.e6f03cp-4",
        "-0x1.fc2208p-4",
        "0x1.23376cp-3",
        "-0x1.555c4ep-3",
        "0x1.99a4b6p-3",
        "-0x1.000006p-2",
        "0x1.555548p-2",
    )
]


def exp(x):
    x = min(max(F(x), F(-104)), F(89))
    magic = F(12582912)
    shifted = fma(x, LOG2E, magic)
    n = F(shifted - magic)
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    p = EXP[0]
    for c in EXP[1:]:
        p = fma(p, r, c)
    p = F(fma(F(p * r), r, r) + F(1))
    power = bits(shifted) - bits(magic)
    half = power >> 1
    return F(F(p * F(2.0**half)) * F(2.0 ** (power - half)))


def log_from(e, f):
    z = F(f * f)
    p = LOG[0]
    for c in LOG[1:]:
        p = fma(p, f, c)
    q = fma(F(f * z), p, F(F(e) * LN2_LOW))
    q = F(fma(F(-0.5), z, q) + f)
    return fma(F(e), LN2_HIGH, q)


def split(x):
    t = bits(x) - 0x3F3504F3
    return t >> 23, F(from_bits((t & 0x7FFFFF) + 0x3F3504F3) - F(1))


def log(x):
    x = F(x)
    if x == 0:
        return F(-math.inf)
    return log_from(*split(x))


def philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK32, (a >> 32) ^ c[3] ^ k[1], a & MASK32]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


def gumbel(token, seed, position, sample_index):
    key = (seed & MASK32, (seed >> 32) & MASK32)
    word = philox((token // 4, position & MASK32, sample_index & MASK32, 0), key)[token % 4]
    if word >= 1 << 18:
        u = min(F(F(word >> 1) * F(2.0**-31)), F(1 - 2.0**-24))
    else:
        tail = philox((token, position & MASK32, sample_index & MASK32, 1), key)[0]
        u = F(F(F(word) + F(F(F(tail >> 9) + F(0.5)) * F(2.0**-23))) * F(2.0**-32))
    exponent, fraction = split(F(F(1) - u))
    return -log(-log_from(exponent, -u if exponent == 0 else fraction))


def sanitized(x):
    x = F(x)
    if np.isnan(x):
        return F(-math.inf)
    return F(min(x, LARGEST) + F(0))


def mass(z):
    high = F(exp(z) * F(2.0**20))
    whole = int(high)
    return (whole << 20) + int(F(F(high - F(whole)) * F(2.0**20)))


def log_sum(total):
    return log(F(F(total) * F(2.0**-40)))


def process(logits, bitmask=None, bias=(), count=None, prompt=None, repetition=1.0, frequency=0.0, presence=0.0):
    """Steps 1 to 4. `bias` is a list of (id, value), `count` and `prompt` are one value a token."""
    repetition, frequency, presence = F(repetition), F(frequency), F(presence)
    result = []
    for token, x in enumerate(logits):
        x = sanitized(x)
        if bitmask is not None and not bitmask[token]:
            x = F(-math.inf)
        entries = [F(value) for entry, value in bias if entry == token]
        if entries:
            total = entries[0]
            for value in entries[1:]:
                total = F(total + value)
            x = sanitized(F(x + total))
        n = 0 if count is None else int(count[token])
        if n > 0 or (prompt is not None and prompt[token]):
            x = sanitized(F(x / repetition) if x > 0 else F(x * repetition))
        if n > 0:
            x = sanitized(F(x - F(frequency * F(n))))
            x = sanitized(F(x - presence))
        result.append(x)
    return result


def kept_tokens(x, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Steps 5 to 8: the tokens that are left, in their order, and z of every token."""
    order = sorted((i for i in range(len(x)) if x[i] > -math.inf), key=lambda i: (-x[i], i))
    largest = x[order[0]]
    greedy = not F(temperature) > F(1e-30)
    inverse = F(1) if greedy else F(F(1) / F(temperature))
    z = {i: F(F(x[i] - largest) * inverse) for i in order}
    if greedy:
        return order, z, True
    if min_p > 0:
        lowest = log(F(min_p)) if F(min_p) < 1 else F(0)
        order = [i for i in order if z[i] >= lowest]
    if top_k > 0:
        order = order[:top_k]
    if F(top_p) < 1:
        limit = max(1, int(float(max(F(top_p), F(0))) * float(sum(mass(z[i]) for i in order))))
        kept, before = [], 0
        for i in order:
            if before >= limit:
                break
            kept.append(i)
            before += mass(z[i])
        order = kept
    return order, z, False


def sample(logits, seed=0, position=0, sample_index=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **processing):
    """Return (token, raw logprob, logprob)."""
    with np.errstate(all="ignore"):
        x = process(logits, **processing)
        raw = [sanitized(value) for value in logits]
        if max(x) == -math.inf:
            return -1, F(-math.inf), F(-math.inf)
        order, z, greedy = kept_tokens(x, temperature, top_k, top_p, min_p)
        token = order[0]
        if not greedy:
            token = min(order, key=lambda i: (-F(z[i] + gumbel(i, seed, position, sample_index)), i))
        logprob = F(z[token] - log_sum(sum(mass(z[i]) for i in order)))
        largest = max(raw)
        total = sum(mass(F(value - largest)) for value in raw if value > -math.inf)
        return token, F(F(raw[token] - largest) - log_sum(total)), logprob
