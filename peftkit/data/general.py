"""General prompts and texts, unrelated to any training data, to measure and limit drift.

All of it was written for peftkit. No prompt is in both lists: a run must not train on what it
measures.
"""

MEASURED = (
    "Why is the sky blue?",
    "Give me three tips for sleeping better.",
    "What is a prime number?",
    "Write a short poem about rain.",
    "How do I boil an egg?",
    "Who wrote Hamlet?",
    "Explain what a database is to a child.",
    "Name five animals that live in the sea.",
    "What should I pack for a weekend in the mountains?",
    "Summarise the story of Cinderella.",
    "How does a bicycle stay upright?",
    "Write a polite email to cancel a meeting.",
    "What is the difference between weather and climate?",
    "Suggest a name for a small bakery.",
    "Translate 'good morning' into French.",
    "What are the benefits of walking every day?",
    "How many minutes are in a day?",
    "Describe the taste of a lemon.",
    "What is the capital of Japan?",
    "Give me an idea for a birthday present for my father.",
    "Explain how rainbows form.",
    "What does a carpenter do?",
    "Write a haiku about winter.",
    "How can I learn to touch-type?",
)
"""Prompts whose answers measure drift (`train.drift`)."""

ANCHORS = (
    "What is photosynthesis?",
    "Tell me a joke.",
    "How do plants drink water?",
    "Name three rivers.",
    "Write two sentences about the moon.",
    "How do I tie a knot?",
    "What is a verb?",
    "Why do cats purr?",
    "Give me a recipe for pancakes.",
    "What is the speed of light?",
    "Explain money to a child.",
    "How do magnets work?",
    "What is a good hobby?",
    "Describe a forest.",
    "Who was Marie Curie?",
    "How do I save time in the morning?",
    "What is the largest ocean?",
    "Write a slogan for a bookshop.",
    "How is cheese made?",
    "What is an island?",
    "Why do we have seasons?",
    "How do I write a letter?",
    "Tell me about elephants.",
    "What is music?",
    "Name a famous painter.",
    "What is gravity?",
    "How do birds fly?",
    "Explain the word 'patience'.",
    "What is bread made of?",
    "Write a sentence about the sea.",
    "How do I clean a window?",
    "What is a volcano?",
)
"""Prompts whose answers a run is anchored to (`task.anchor`)."""

TEXTS = (
    """The sea near our village rises and falls twice a day. My grandmother kept a table of the
tides on the kitchen wall, next to the calendar, and she planned her errands by it: the low road to
the market is under water for an hour around high tide. The moon pulls the water towards itself, she
said, and on the far side of the earth the water is left a little behind, so there are two bulges
and the earth turns through both. When the sun helps, at new moon and full moon, the bulges grow.
On those nights my uncle pulls his boat one post higher and checks the rope twice.""",
    """Lentil soup for four. Rinse 250 g of brown lentils until the water stays clear. Cut one
onion, two carrots and a stick of celery into small cubes, and let them soften in three spoons of
oil over a low flame; this takes about ten minutes and should not be hurried. Add a clove of garlic,
a teaspoon of cumin and the lentils, stir once, and pour in a litre and a half of water. Simmer for
35 minutes with the lid half closed. Salt only at the end, because salt keeps the skins hard. A
spoon of vinegar and some chopped parsley make it bright. It tastes better on the second day.""",
    """Dear Ms. Okafor, thank you for the quick repair of our boiler last Thursday. It has been
running without a sound since then, and the children are glad to have warm water again. One small
question about the invoice: it lists two hours of travel, although your workshop is only three
streets away. I suppose the line was meant for another customer. Could you send us a corrected copy?
I will transfer the amount on the same day. We would also like to book the yearly inspection with
you; any weekday morning in October would suit us. With kind regards, Martin Weiss""",
    """def moving_average(values, width):
    \"\"\"Return the mean of each window of `width` neighboring values.\"\"\"
    if not 0 < width <= len(values):
        raise ValueError(f"width is {width}, but there are {len(values)} values")
    total = sum(values[:width])
    means = [total / width]
    for new, old in zip(values[width:], values):
        total += new - old
        means.append(total / width)
    return means

temperatures = [3.5, 4.0, 6.5, 9.0, 8.0, 7.5]
print(moving_average(temperatures, 3))""",
    """"You are late," said Ruth. "The train waited for a cow," said Paul, and hung his wet coat
over the radiator. "A cow?" "It stood on the track near Ellingen and looked at us. The driver rang
his bell, the farmer came with a bucket, and the cow thought it over for twenty minutes." Ruth
poured him some tea. "Last week it was snow, in May. Before that a suitcase without an owner." "I
write them all down," said Paul. "One day I will make a book of it." "And who is going to believe a
single page?" said Ruth. He laughed. "Nobody. That is why it will be called The Timetable." """,
    """A lighthouse does not need a strong lamp; it needs a good lens. The first large ones burned
oil, and most of the light went up into the clouds or down on the rocks. A curved block of glass
could have gathered it, but a block of that size weighs tons and cracks as it cools. The solution
was to keep only the surface of the curve: many thin rings of glass, each cut at its own angle, set
into a brass frame like the steps of a staircase. Such a lens is light enough to float in a basin of
mercury, where a clockwork with a falling weight could turn it all night.""",
    """Minutes of the allotment club, 14 March. Present: nine members, apologies from two. 1. The
water pump leaks at the lower joint. Hanna will get two offers; the limit is 300 euros. 2. Plot
seven is free from April. There are four names on the waiting list, and the first one has until the
end of the month to answer. 3. Compost: please no cooked food and no citrus peel, it brings rats. 4.
The summer party is on the second Saturday of July. Salads are welcome, and Tom brings a longer
table. 5. Any other business: the gate code changes on Monday. Closed at 20:40.""",
    """How to change the inner tube of a bicycle wheel. First let out the rest of the air and push
the tire towards the middle of the rim, all the way around; there is a groove that gives you slack.
Opposite the valve, hook one lever under the edge and fold it down, then a second one a hand's width
further. Pull out the old tube. Before the new one goes in, run your fingers along the inside of the
tire: whatever made the hole is often still there. Pump the new tube just enough to be round, lay it
in without twists, and press the edge back by hand. Levers at this point make new holes.""",
    """Birds that fly far in autumn do not simply follow the warmth. A young warbler that has never
left its valley turns south-west on its first clear September night, even in a cage, and hops
against the wires on that side for as many weeks as the journey would take. It seems to carry a
direction and a duration. The stars help, since they turn around one quiet point, and so does the
magnetic field of the earth. Older birds do better: if a storm drives them off course, they correct
for it, while the young ones keep to their angle and end up somewhere new.""",
    """Opening hours of the town library. Monday: closed. Tuesday and Thursday: 10 to 18. Wednesday:
14 to 20, with the reading circle in the upper room from 18:30. Friday: 10 to 16. Saturday: 10 to
13. Books can be borrowed for four weeks, films and games for one week. Renewals are possible twice,
by telephone, at the desk or on our page, unless someone else has reserved the title. Each started
week of delay costs 50 cents for adults; children pay nothing. Please bring your card. Lost cards
are replaced for three euros. The return flap at the entrance is always open.""",
    """A fair coin is thrown until heads appears for the first time. How many throws does it take on
average? Call the answer x. One throw is always needed. With probability one half it shows heads and
we are done; otherwise we are where we began, and x more throws are to be expected. Therefore x = 1
+ x / 2, and so x = 2. The same trick answers a harder question: how long until two heads appear in
a row? Let y be the expected number. After the first tail we start again, after a head and a tail as
well: y = (1 + y) / 2 + (2 + y) / 4 + 2 / 4, which gives y = 6.""",
    """The old man next door repaired clocks until his hands began to shake. His shop had one narrow
window, and in the afternoon the light fell on a row of tin boxes, each with a name in pencil. He
never threw a gear away. When I was ten he let me sort them by size, and paid me with a coin and a
story. He said that a clock does not measure time, it only agrees with other clocks, and that the
whole art is to make it forget temperature. After his death the boxes stayed in the window for a
year. Then one morning they were gone, and there was a shop for telephones.""",
)
"""Short texts of several kinds, about 150 tokens each."""
