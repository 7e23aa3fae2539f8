"""The largest batch that fits."""


def largest(probe, most, guess):
    """The largest number of rows up to `most` of which `probe(rows)` says true, where it says false of all larger ones. Begins at
    `guess`, beside which it most likely is, and returns 0 where one row does not fit."""
    fits, fails, stride = 0, most + 1, 1
    rows = min(max(guess, 1), most)
    while fails - fits > 1:
        if probe(rows):
            fits = rows
        else:
            fails = rows
        if fits == 0:
            rows = max(1, fails - stride)
        elif fails == most + 1:
            rows = min(most, fits + stride)
        else:
            rows = (fits + fails) // 2
        stride *= 2
    return fits
