"""What is drawn for a question: words, numbers and ids, and words that nobody has seen before."""

import random
from uuid import UUID

_ADJECTIVES = """
able absent abstract active acute adept agile airy alert aloof amber ample ancient angular apt arctic ardent arid
artful ashen astute avid aware awkward azure balmy bare basic beaming bent benign bitter blank blazing bleak blended
blissful bold bonny bookish boreal boxy brave brazen breezy brief bright brisk brittle broad bronze bubbly bulky buoyant
burly bushy busy calm candid careful careless caring casual cautious central certain charming chatty cheerful chief
chilly chubby circular civic civil classic clean clear clever close cloudy clumsy coarse coastal cobalt cold common
compact complete complex composed concise constant cool copper coral cordial cosmic costly cosy crafty creamy creative
crimson crisp cryptic curious curly curved daily dainty damp dapper daring dark dazzling dear decent deep deft delicate
dense devoted different diligent dim direct distant double dreamy droll drowsy dry dull durable dusky dusty
dutiful eager early earnest earthen easy elastic elated elder elegant eminent empty enduring equal erratic eternal
exact exotic expert fabled faded faint fair faithful famous fancy fast fearless feathery feeble fertile festive few
fickle fierce fiery final fine firm fitting fleecy fleet flimsy floral fluent fluffy fond foolish foremost formal
fortunate forward fragile fragrant frank free frequent fresh friendly frosty frugal full funny fuzzy gallant gaunt
generous gentle gifted gilded glad gleaming glib global glossy golden graceful gracious grand grateful grave great
green gritty gruff gusty handy happy hardy harsh hasty hazel hazy hearty heavy helpful hidden hilly hoarse hollow
honest hopeful huge humble humid hungry hushed icy ideal idle immense inland inner intact ivory jaded jagged jolly
jovial joyful jubilant juicy jumpy just keen kind knotty known lanky large late lavish lawful lazy leafy lean legal
level light likely limber limpid linear little lively lofty lone long loose loud lovely loyal lucid lucky lunar lush
lustrous magenta main major marine maroon massive mature meagre meek mellow merry mighty mild milky mindful minor
misty mobile modern modest moist mossy muddy muffled mundane murky musical mute mystic naive narrow nautical neat
nervous neutral new nifty nimble noble noisy normal northern novel numb obscure ochre odd olive open opulent orderly
ornate outer oval pale partial patient peaceful pearly perky petite placid plain playful plucky plump poetic polar
polished polite portly precise prime prompt proper proud prudent punctual puny pure quaint quick quiet quirky radiant
rapid rare raspy ready real recent regal remote rich rigid ripe robust rocky romantic rosy rough round royal ruddy
rugged rural russet rustic sandy sane scarlet scenic secret sedate serene severe shady shallow sharp shiny short shrewd
shy silent silky silver simple sincere sleek sleepy slender slim slow small smoky smooth snowy sober social soft solar
solemn solid sombre sparse spicy spiral splendid spry square stable stark steady steep sterling stern still stoic
stout strict strong sturdy subtle sudden sunny supple swift tacit tactful tall tame tangy tardy tart tasty tawny teal
tender tepid terse thick thin thorny tidy timely timid tiny tired tough tranquil trim tropical true trusty twin
unique upbeat upper urban urgent useful vacant vague valiant valid vast velvet verbal versed vibrant vigilant vintage
violet vital vivid vocal wary warm watchful watery wavy weary weighty western whole wide wild willing windy wintry
wiry wise wispy witty wooden woolly wry yellow young youthful zany zealous zesty
"""

ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
"""Adjectives of the keys."""

_NOUNS = """
abbey acorn acre actor adder album alcove alley almond alpaca amulet anchor angle ankle anvil apple apron arbour arch
arena armour arrow artist aspen atlas attic author avenue awning axle badge badger bakery balcony ballad balloon
bamboo banjo banner banquet barge barley barn baron barrel basin basket bassoon bay beach beacon bead beak beam bear
beaver bee beech beetle bell bench berry birch bison blanket blossom boat bonfire bonnet book boot bottle boulder
bouquet bowl bracelet branch brass bread brick bridge brook broom brush bubble bucket buckle buffalo bugle burrow
button cabin cable cactus camel camera canal candle canoe canopy canvas canyon cape captain caravan cargo carpet
carriage castle cat cavern cedar cellar cello chalk channel chapel chariot chart cheese cherry chest chimney chisel
choir cider circus citadel clarinet clay cliff cloak clock cloth cloud clover coach cobbler comb comet compass condor
cookie corner cottage cotton cougar courier cove cradle crane crater creek cricket crown crystal cuckoo cup curtain
cushion cymbal cypress dagger dairy daisy dam dancer dawn deer delta desert desk dial diary dolphin donkey door dove
dragon drawer drum duchess duckling dune eagle earth easel echo eel elbow elder elk elm ember emerald engine envelope
estate falcon farm farmer feather fence fern ferry festival fiddle field fig finch fjord flag flame flask flint flower
flute fog forest forge fork fortress fossil fountain fox frame frigate frog fruit furnace gable gallery galley garden
garland garlic garnet gate gazelle geyser giant ginger giraffe glacier glade glass glove goat goblet goose gorge grain
granary granite grape grass gravel grove guitar gull hamlet hammer hammock harbour hare harp harvest hat hawk hazelnut
hearth hedge helmet hen herb herald heron hill hinge hive holly honey hoof horizon horn hornet horse hound house hut
hymn ibis iceberg inn iris iron island ivy jacket jackal jaguar jar jasmine jelly jester jetty jewel jug juggler
juniper kayak kernel kettle key kingdom kitchen kite knight knot lace ladder lagoon lake lamb lamp lance lantern larch
lark lasso lattice laurel lava lavender lawn leaf ledge lemon lentil leopard letter lever library lichen lighthouse
lilac lily lime linen lion lizard llama lobster locket locomotive loft log loom lotus lute lynx macaw magnet magpie
mallet mandolin manor mansion mantle map maple marble mare marigold market marmot marsh mask mason mast meadow medal
melody melon merchant meteor mill miner mineral mint mirror mitten moat mole monk monsoon moon moor moose mosaic moss
moth mountain mouse mule museum mushroom musket mustard nectar needle nest nettle nickel night nook notebook nugget
nurse nutmeg oak oar oasis oat oboe ocean octopus onion opal orchard orchid organ otter outpost oven owl ox oyster
paddle page pagoda painter palace palm panther papaya paper parade parcel parrot parsley pasture path pavilion peach
peacock peak pear pearl pebble pelican pencil pepper pheasant piano pickle pier pigeon pilgrim pillar pillow pilot
pine pitcher plain planet plank plateau plaza plough plum plume poem poet pond pony poplar poppy porch portrait potter
prairie prism pulley pumpkin puppet pyramid quail quarry quartz queen quill quilt quince rabbit radish raft rail
raisin ram raven ravine reed reef ribbon rice ridge ring river robin robe rocket roof rooster root rope rose rowan
ruby rudder rug saddle sage sail sailor salmon salt sand sandal sapphire satchel sauce saucer saxophone scarf sceptre
school scroll sculptor seagull seal seashell shawl shed sheep shell shepherd shield ship shore shovel sickle sieve
signal silo singer sketch slate sleigh sling slipper sloop snail snow sofa song sparrow spear sphere spider spindle
spire spoon spring spruce squash squirrel stable stag stair star statue steeple stem stone stork storm stove straw
stream street string studio sugar summit sun swallow swan swamp sword symphony table tailor talon tambourine tapestry
tavern teapot temple tent terrace thicket thimble thistle throne thrush thunder tide tiger timber toad tomato torch
tortoise tower trail train treasure tree trellis trout trowel trumpet tulip tunnel turnip turret turtle tusk twig
umbrella valley vase vault veil velvet veranda vessel vest village vine vinegar viola violin vulture wagon waistcoat
walnut walrus wand warbler watch water waterfall wave weasel weaver whale wharf wheat wheel whistle willow wind
windmill window wing winter wizard wolf wood wool wreath wren yacht yard yarn yeast yew zebra zephyr zinc zither
"""

NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
"""Nouns of the keys."""

_ONSETS = ("b", "br", "c", "d", "dr", "f", "fl", "g", "gr", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t")
_RHYMES = ("a", "an", "ar", "e", "el", "en", "i", "in", "ir", "o", "ol", "on", "u", "um", "ux")


def key_word(rng: random.Random) -> str:
    """An adjective and a noun, such as ``brave-otter``: the keys of RULER's needles and of LongEval's lines.

    The originals draw from the lists of the package `wonderwords`; these lists are our own.
    """
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng: random.Random, digits: int = 7) -> str:
    """A number of so many digits, the first of which is not 0: RULER's values have 7."""
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def uuid(rng: random.Random) -> str:
    """A random UUID (version 4), such as ``1b4e28ba-2fa1-41d2-883f-0016d3cca427``."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def made_up_words(rng: random.Random, count: int) -> list[str]:
    """Distinct words of two syllables or more that mean nothing, such as ``flumaren``.

    Of two generators of one seed, the longer list begins with the shorter.

    Args:
        rng: Random generator.
        count: Number of words; there is no end to them.
    """
    words: dict[str, None] = {}  # in the order in which they were drawn
    while len(words) < count:
        word = "".join(_syllable(rng) for _ in range(rng.choice((2, 2, 3))))
        while word in words:
            word += _syllable(rng)
        words[word] = None
    return list(words)


def _syllable(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_RHYMES)
