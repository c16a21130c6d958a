"""Sentences about restaurants, as a table-to-text model would write them, for the metrics of
texts."""

PREDICTIONS = [
    "The Vaults is a pub near Café Adriatic, with a 5 out of 5 rating.",
    "Blue Spice is a coffee shop. It isn't family-friendly.",
    "Prices start at £20-25 at The Punter, a restaurant in the city centre with a view!",
    "Cotto serves cheap English food, cheap food, to 1,000 people (a day).",
]
REFERENCES = [
    [
        "The Vaults pub near Café Adriatic has a 5 star rating.",
        "Near Café Adriatic you can find The Vaults, a pub with a 5 out of 5 rating.",
    ],
    ["Blue Spice is a coffee shop near the river; it is not family-friendly."],
    [
        "The Punter is a restaurant in the city centre with prices from £20-25.",
        "In the city centre The Punter serves food at £20-25.",
        "At The Punter, a restaurant in the city centre, prices start at £20.",
    ],
    ["Cotto is serving cheap English foods.", "1,000 people a day eat cheap English food at Cotto."],
]  # fmt: skip

# The same texts in the words of the Penn Treebank, without case and punctuation, by hand. Brackets
# are punctuation by their names in capitals alone, so they stay.
PTB_PREDICTIONS = [
    "the vaults is a pub near café adriatic with a 5 out of 5 rating",
    "blue spice is a coffee shop it is n't family-friendly",
    "prices start at # 20-25 at the punter a restaurant in the city centre with a view",
    "cotto serves cheap english food cheap food to 1,000 people -lrb- a day -rrb-",
]
PTB_REFERENCES = [
    [
        "the vaults pub near café adriatic has a 5 star rating",
        "near café adriatic you can find the vaults a pub with a 5 out of 5 rating",
    ],
    ["blue spice is a coffee shop near the river it is not family-friendly"],
    [
        "the punter is a restaurant in the city centre with prices from # 20-25",
        "in the city centre the punter serves food at # 20-25",
        "at the punter a restaurant in the city centre prices start at # 20",
    ],
    ["cotto is serving cheap english foods", "1,000 people a day eat cheap english food at cotto"],
]


def longest(one: list[str], other: list[str]) -> int:
    """The length of the longest common subsequence, row by row."""
    row = [0] * (len(other) + 1)
    for word in one:
        above = row[:]
        for index, there in enumerate(other):
            longer = max(above[index + 1], row[index])
            row[index + 1] = above[index] + 1 if word == there else longer
    return row[-1]
