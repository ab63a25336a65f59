"""The words of `lookups.py`: how facts are stated and asked for, and how lists of keys and values
look.

None of them is a wording that our measurements use (`tests/train/test_lookups.py` checks runs of
five words): a model that learned on these has not seen the question it is measured with. A
statement and a question begin with white space, and a question has no text after its {value}.
"""

from typing import NamedTuple


class Relation(NamedTuple):
    """What is said of a {noun} and an {owner}, how it is asked for, and the kinds of value."""

    nouns: tuple[str, ...]
    owners: tuple[str, ...]
    values: tuple[str, ...]
    said: tuple[str, ...]
    asked: tuple[str, ...]


def _words(listed: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in listed.split(","))


FIRST_NAMES = _words(
    "Alice,Robert,Margaret,Ivan,Tom,Eleanor,Amara,Diego,Yuki,Fatima,Oscar,Priya,Lukas,Nadia,Samuel,Ingrid,Chen,Rosa,"
    "Walter,Leila,Hugo,Agnes,Kofi,Martha,Pavel,Sofia,George,Hana,Emil,Beatrice,Omar,Clara"
)
SURNAMES = _words(
    "Hale,Moreau,Novak,Silva,Tanaka,Okafor,Lindqvist,Marsh,Petrov,Rossi,Haddad,Keller,Brandt,Osei,Kowalski,Finch,"
    "Delgado,Iyer,Whitmore,Larsen,Castellano,Ng,Abbott,Sorensen,Volkov,Pereira,Quinn,Baptiste,Yilmaz,Thorne"
)
BODIES = _words(
    "the old mill,the red house,the station,the north depot,the harbour office,the museum,the "
    "bakery,the night train,room 14,the second unit,the observatory,the village school,the Blue "
    "Anchor,the council,the upper laboratory,the west gate,the printing house,the theatre,the farm "
    "by the river,the customs house,the orchestra,the archive"
)

PROPERTY = Relation(
    nouns=_words(
        "code,account number,price,password,address,birthday,weight,score,height,phone "
        "number,ticket,seat,locker,"
        "order number,room,badge,rank,size,temperature,membership,licence "
        "plate,combination,username,callsign,budget,"
        "reference,serial number,extension,deposit,distance,age,invoice,batch,postcode,shift,platform,fee,setting,"
        "bus line,frequency,channel,shelf mark,version,alias,nickname,token,dose,debt,salary,lot"
    ),
    owners=BODIES + FIRST_NAMES,
    values=("number", "number", "number", "code", "name"),
    said=(
        " Note that {owner}'s {noun} is {value}.",
        "\n{owner}: {noun} {value}.",
        "\nThe {noun} that {owner} was given is {value}; keep it in mind.\n",
        " ({noun}, {owner}: {value})",
        " By then {owner} had already changed the {noun} to {value}.",
        " According to the register, the {noun} belonging to {owner} equals {value}.",
        ' "Our {noun}," said someone from {owner}, "is {value}."',
        "\n* {value} is the {noun} of {owner}\n",
        " {value}, written in pencil, was {owner}'s {noun}.",
        " Everyone there knew {value} as the {noun} that {owner} used.",
        "\n[memo] {owner} / {noun} / {value}\n",
        " It turned out that {value} had been chosen by {owner} as {noun}.",
        " In the margin somebody had noted: {noun} ({owner}) = {value}.",
        "\nMessage from {owner}: we have set our {noun} to {value}. Do not lose it.\n",
        " For {owner} the clerk entered a {noun} of {value}.",
        "\n# {noun} of {owner}: {value}\n",
        " Whoever calls {owner} should mention {value}, its {noun}.",
        " They gave {owner} {value} as {noun}.",
    ),
    asked=(
        "\nQuestion: which {noun} does {owner} have?\nAnswer: {value}",
        "\nQ: {owner}'s {noun}?\nA: {value}",
        "\nThe {noun} of {owner} is {value}",
        " He asked for the {noun} of {owner}, which was {value}",
        "\n{owner}: {noun} {value}",
        " When they needed {owner}'s {noun}, they looked it up: {value}",
        " As stated above, {owner}'s {noun} is {value}",
        "\nUser: Please tell me {owner}'s {noun}.\nAssistant: It is {value}",
        " So on behalf of {owner} she typed in the {noun}, {value}",
        ' "And {owner}\'s {noun}?" "{value}',
        "\nrecall({owner}, {noun}) = {value}",
        " Once more, {noun} and {owner} belong together: {value}",
        "\n\nFill in the form.\nName: {owner}\n{noun}: {value}",
        " Nobody but {owner} remembered the {noun}; it was {value}",
        "\n> {noun} ({owner})\n{value}",
        ' The letter to {owner} began: "Your {noun} remains {value}',
        " To get it right, the {noun} of {owner} must be {value}",
        "\nRepeat what was said about the {noun} of {owner}. {value}",
    ),
)

PLACE = Relation(
    nouns=_words(
        "lantern,umbrella,ledger,violin,map,silver "
        "key,parcel,raincoat,telescope,toolbox,diary,compass,photograph,"
        "suitcase,manuscript,watch,coin,letter,ring,bicycle,globe,blanket,teapot,painting,knife,rope,basket,microscope"
    ),
    owners=FIRST_NAMES,
    values=("spot", "spot", "name", "code"),
    said=(
        " {owner} hid the {noun} next to {value}.",
        " The {noun} which {owner} lost had been left with {value}.",
        "\n{noun} ({owner}) -> {value}\n",
        " {value} is where {owner} keeps the {noun}.",
        ' "If you need my {noun}," {owner} said, "look near {value}."',
        " Since spring {owner} has stored the {noun} at {value}.",
        "\nInventory: {noun}; owner {owner}; location {value}.\n",
        " Behind {value}, wrapped in paper, lay the {noun} of {owner}.",
    ),
    asked=(
        "\nQ: Where can {owner}'s {noun} be found?\nA: {value}",
        " They went to fetch {owner}'s {noun}, which meant going to {value}",
        "\nlocation of {noun} ({owner}): {value}",
        ' "Has anyone seen {owner}\'s {noun}?" "Try {value}',
        " {owner} wanted the {noun} back, so they turned to {value}",
        "\n{noun} ({owner}) -> {value}",
        " Anyone looking for the {noun} of {owner} has to start from {value}",
        "\nFind: {noun}, {owner}\nFound: {value}",
    ),
)

ROLE = Relation(
    nouns=_words(
        "director,cook,night guard,treasurer,secretary,gardener,engineer,pilot,editor,captain,conductor,librarian,"
        "driver,accountant,porter,inspector,translator,surgeon,mechanic,teacher,referee,founder,owner,tenant"
    ),
    owners=BODIES,
    values=("name",),
    said=(
        " {value} works as {noun} at {owner}.",
        " At {owner} they call their {noun} {value}.",
        " Last year {owner} made {value} its {noun}.",
        "\n{owner}\n  {noun}: {value}\n",
        " Should you write to {owner}, ask for {value}, the {noun}.",
        ' "I am {value}," the {noun} from {owner} introduced herself.',
        " As {noun}, {owner} had hired a certain {value}.",
        " {value} ({noun}, {owner}) arrived late.",
    ),
    asked=(
        "\nQuestion: Who is {noun} at {owner}?\nAnswer: {value}",
        " The person who served {owner} as {noun} was called {value}",
        "\n{owner}\n  {noun}: {value}",
        " They telephoned {owner} and asked to speak with the {noun}, {value}",
        ' "Who is your {noun} at {owner}?" "That would be {value}',
        " Signed by the {noun} of {owner}, {value}",
        "\n{noun}, {owner} = {value}",
        " In the end {owner} thanked its {noun}, {value}",
    ),
)

SPOTS = _words("shelf,drawer,box,locker,crate,cabinet,cell,bench,gate,pier,bin,aisle")

RELATIONS = (PROPERTY, PROPERTY, PLACE, ROLE)

ENDINGS = (".", ".", ",", "\n", ";", " and")  # after an answer in running text


class Form(NamedTuple):
    """A list of keys and values: what stands before, each line of it, what stands after."""

    head: str
    line: str
    foot: str


FORMS = (
    Form("\nNotes\n", "\n- {key}: {value}", "\n"),
    Form("\n", "\n{key} = {value}", "\n"),
    Form("\n", "\n{key}\t{value}", "\n"),
    Form("\n{", '\n  "{key}": "{value}",', "\n}\n"),
    Form(" {", ' "{key}": "{value}",', " }\n"),
    Form(" dict(", " {key}='{value}',", " )\n"),
    Form("\n| name | entry |\n|---|---|", "\n| {key} | {value} |", "\n"),
    Form("\nid,data", "\n{key},{value}", "\n"),
    Form("\n<table>", "\n<tr><td>{key}</td><td>{value}</td></tr>", "\n</table>\n"),
    Form("\n", "\n{key} -> {value}", "\n"),
    Form("\nentries:", "\n  {key}: '{value}'", "\n"),
    Form("\n", "\nexport {key}={value}", "\n"),
    Form(" Pairs:", " ({key}, {value})", "."),
    Form("\n", "\n<{key}> {value}", "\n"),
    Form("\nINSERT INTO pairs VALUES", "\n  ('{key}', '{value}'),", "\n;\n"),
)

QUESTIONS = (
    "\n>>> lookup('{key}')\n'{value}",
    "\nEntry {key}? {value}",
    " Under {key} the list gives {value}",
    " Going back to {key}, we read {value}",
    "\nQ: {key}\nA: {value}",
    "\nKey: {key}\nValue: {value}",
    "\n$ get {key}\n{value}",
    " Beside {key} stands {value}",
    '\nget("{key}") returns "{value}',
    " whereas {key} goes with {value}",
    "\nUser: {key}?\nAssistant: {value}",
    " ({key} was paired with {value}",
)
