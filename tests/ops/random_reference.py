"""The random operators as plain loops over integers and NumPy floats: the formulas of docs/ops/random.md.

Nothing of the library is used, so the numbers are those of every substrate.
"""

import math
from fractions import Fraction

import numpy as np
import sample_reference as reference

F = np.float32
MASK32 = 0xFFFFFFFF
FILLS, RACES = 2, 3
BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


def block(seed, offset, index, stream=FILLS, third=0):
    counter = (offset + index) % 2**64
    key = (seed & MASK32, (seed >> 32) & MASK32)
    return reference.philox((counter & MASK32, counter >> 32, third, stream), key)


def words(seed, offset, count):
    return [word for index in range(math.ceil(count / 4)) for word in block(seed, offset, index)][:count]


def threshold(p):
    return 2**32 if p >= 1 else int(p * 2**32)


def bernoulli(seed, offset, probabilities):
    drawn = words(seed, offset, len(probabilities))
    return [float(word < threshold(p)) for word, p in zip(drawn, probabilities, strict=True)]


def uniform(seed, offset, count, low=0.0, high=1.0, dtype="float32"):
    bits = BITS[dtype]
    scaled = [F(word >> (32 - bits)) * F(2.0**-bits) for word in words(seed, offset, count)]
    return [reference.fma(u, F(high) - F(low), F(low)) for u in scaled]


def minus_log(word):
    v = F(F(F(word >> 1) + F(0.5)) * F(2.0**-31))
    return F(-reference.log(min(v, F(1 - 2.0**-24))))


def exponential(seed, offset, count, rate=1.0):
    return [F(minus_log(word) / F(rate)) for word in words(seed, offset, count)]


SINE = [F(float.fromhex(c)) for c in ("0x1.71de3ap-19", "-0x1.a01a02p-13", "0x1.111112p-7", "-0x1.555556p-3")]
COSINE = [F(float.fromhex(c)) for c in ("-0x1.27e4fcp-22", "0x1.a01a02p-16", "-0x1.6c16c2p-10", "0x1.555556p-5")]


def series(coefficients, x):
    p = coefficients[0]
    for c in coefficients[1:]:
        p = reference.fma(p, x, c)
    return p


def turned(quarter, sine, cosine):
    a, b = (cosine, sine) if quarter % 2 else (sine, cosine)
    return (-a if quarter & 2 else a), (-b if (quarter + 1) & 2 else b)


def sine_cosine(word):
    turn = word >> 8
    quarter = (turn + 2**21) >> 22
    angle = F(F(F(turn - (quarter << 22)) * F(2.0**-24)) * F(float.fromhex("0x1.921fb6p+2")))
    square = F(angle * angle)
    sine = reference.fma(F(series(SINE, square) * square), angle, angle)
    cosine = reference.fma(F(series(COSINE, square) * square), square, reference.fma(F(-0.5), square, F(1)))
    return turned(quarter, sine, cosine)


def normal(seed, offset, count, mean=0.0, std=1.0):
    out = []
    drawn = words(seed, offset, count + 3)
    for i in range(0, count, 2):
        radius = np.sqrt(F(F(2) * minus_log(drawn[i])))
        sine, cosine = sine_cosine(drawn[i + 1])
        out += [reference.fma(F(radius * part), F(std), F(mean)) for part in (cosine, sine)]
    return out[:count]


# ------------------------------------------------------------------------------------------------------------ float64


def fma(a, b, c):
    return float(Fraction(a) * Fraction(b) + Fraction(c))


def wide_words(seed, offset, count):
    drawn = words(seed, offset, 2 * count)
    return [drawn[2 * i] << 32 | drawn[2 * i + 1] for i in range(count)]


def wide_uniform(seed, offset, count, low=0.0, high=1.0):
    return [fma((word >> 11) * 2.0**-53, high - low, low) for word in wide_words(seed, offset, count)]


def wide_log(x):
    mantissa, exponent = math.frexp(x)
    if mantissa < float.fromhex("0x1.6a09e667f3bcdp-1"):
        mantissa, exponent = 2 * mantissa, exponent - 1
    f = mantissa - 1
    s = f / (2 + f)
    z = s * s
    p = 1 / 21
    for n in range(19, 2, -2):
        p = fma(p, z, 1 / n)
    low = exponent * float.fromhex("0x1.ef35793c7673p-45")
    rest = fma(2 * s, p * z, fma(-s, f, low))
    return fma(exponent, float.fromhex("0x1.62e42fefa38p-1"), f + rest)


def wide_minus_log(word):
    return -wide_log(((word >> 12) + 0.5) * 2.0**-52)


def wide_exponential(seed, offset, count, rate=1.0):
    return [wide_minus_log(word) / rate for word in wide_words(seed, offset, count)]


def wide_series(degree, x):
    """Power series of sine or cosine from the term of this degree down to the third one, in powers of x squared."""
    p = 0.0
    for n in range(degree, 2, -2):
        sign = -1 if (n // 2) % 2 else 1
        p = fma(p, x, sign / math.factorial(n))
    return p


def wide_normal(seed, offset, count, mean=0.0, std=1.0):
    out = []
    drawn = wide_words(seed, offset, count + 1)
    for i in range(0, count, 2):
        radius = math.sqrt(2.0 * wide_minus_log(drawn[i]))
        turn = drawn[i + 1] >> 11
        quarter = (turn + 2**50) >> 51
        angle = (turn - (quarter << 51)) * 2.0**-53 * float.fromhex("0x1.921fb54442d18p+2")
        square = angle * angle
        sine = fma(wide_series(17, square) * square, angle, angle)
        cosine = fma(wide_series(16, square) * square, square, fma(-0.5, square, 1.0))
        sine, cosine = turned(quarter, sine, cosine)
        out += [fma(radius * part, std, mean) for part in (cosine, sine)]
    return out[:count]


# -------------------------------------------------------------------------------------------------------- multinomial


def weights(row):
    """Probabilities over the power of two above the largest; they are plain floats."""
    _, exponent = math.frexp(max(row))
    return [math.ldexp(p, -exponent) for p in row]


def race_exponential(word, tail):
    if word >= 1 << 18:
        u = min(F(F(word >> 1) * F(2.0**-31)), F(1 - 2.0**-24))
    else:
        u = F(F(F(word) + F(F(F(tail >> 9) + F(0.5)) * F(2.0**-23))) * F(2.0**-32))
    exponent, fraction = reference.split(F(F(1) - u))
    return F(-reference.log_from(exponent, -u if exponent == 0 else fraction))


def multinomial(seed, offset, rows, samples, replacement):
    result = []
    for number, row in enumerate(rows):
        w = weights(row)
        if replacement:
            masses = [math.floor(x * 2.0**39) for x in w]
            total, drawn = sum(masses), []
            for k in range(samples):
                four = block(seed, offset, number * math.ceil(samples / 2) + k // 2)
                target = ((four[2 * (k % 2)] << 32 | four[2 * (k % 2) + 1]) * total) >> 64
                before = 0
                for j, mass in enumerate(masses):
                    before += mass
                    if before > target:
                        drawn.append(j)
                        break
            result.append(drawn)
            continue
        scores = []
        for j, x in enumerate(w):
            index = number * math.ceil(len(row) / 4) + j // 4
            word = block(seed, offset, index)[j % 4]
            tail = block(seed, offset, index, RACES)[j % 4]
            scores.append(F(F(x) / race_exponential(word, tail)) if row[j] > 0 else F(-1))
        result.append(sorted(range(len(row)), key=lambda j: (-scores[j], j))[:samples])
    return result
