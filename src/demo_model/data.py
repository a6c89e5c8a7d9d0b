"""Lines of text with one date in them, made by rule, in English, German, French and Spanish.

`Lines(seed, split)` is an endless iterator over (text, "YYYY-MM-DD") pairs.

The three splits never share a line: `bucket(text)`, a checksum of the text, decides which split
may use it ("eval": 0, "fresh": 1, "train": the other 62 of 64). "eval" lines also draw on
names, nouns, cities and sentence frames that the other two splits never see (the `*_HELD` lists).
"""

import datetime
import random
import unicodedata
import zlib

MAX_BYTES = 110
BUCKETS = 64
LANGUAGES = ("en", "de", "fr", "es")

# Month names: index 0 is January; the first list is the full names, the second abbreviations.
MONTHS = {
    "en": (
        "January February March April May June July August September October November December".split(),
        [["Jan"], ["Feb"], ["Mar"], ["Apr"], ["May"], ["Jun"], ["Jul"], ["Aug"], ["Sep", "Sept"],
         ["Oct"], ["Nov"], ["Dec"]],
    ),
    "de": (
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split(),
        [["Jan", "Jän"], ["Feb"], ["Mär", "Mrz"], ["Apr"], ["Mai"], ["Jun"], ["Jul"], ["Aug"],
         ["Sep", "Sept"], ["Okt"], ["Nov"], ["Dez"]],
    ),
    "fr": (
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre".split(),
        [["janv", "jan"], ["févr", "fév"], ["mars"], ["avr"], ["mai"], ["juin"], ["juil"], ["août"],
         ["sept"], ["oct"], ["nov"], ["déc"]],
    ),
    "es": (
        "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre".split(),
        [["ene"], ["feb"], ["mar"], ["abr"], ["may"], ["jun"], ["jul"], ["ago"], ["sep", "sept"],
         ["oct"], ["nov"], ["dic"]],
    ),
}

# Weekdays, Monday first. Short forms that are also a month's (mar. for mardi, martes) are left out.
WEEKDAYS = {
    "en": ("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
           "Mon Tue Wed Thu Fri Sat Sun".split()),
    "de": ("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag".split(),
           "Mo Di Mi Do Fr Sa So".split()),
    "fr": ("lundi mardi mercredi jeudi vendredi samedi dimanche".split(),
           "lun mardi mer jeu ven sam dim".split()),
    "es": ("lunes martes miércoles jueves viernes sábado domingo".split(),
           "lun martes mié jue vie sáb dom".split()),
}

# Words that may stand right before a date.
BEFORE = {
    "en": ["on", "on", "on the", "dated", "from", "since", "by", "until", "of", "due", "for", "date:"],
    "de": ["am", "am", "vom", "vom", "den", "zum", "bis", "seit", "ab", "Datum:"],
    "fr": ["le", "le", "le", "du", "au", "depuis le", "avant le", "en date du", "date :"],
    "es": ["el", "el", "el", "del", "desde el", "hasta el", "con fecha", "fecha:"],
}

NAMES = """Lee Smith Miller Jones Brown Clark Davis Evans Green Harris King Moore Parker Reed Scott
Turner Walker White Young Adams Baker Müller Schmidt Schneider Fischer Weber Meyer Wagner Becker
Schulz Hoffmann Koch Richter Klein Wolf Schröder Neumann Braun Krüger Groß Martin Bernard Dubois
Thomas Robert Petit Durand Leroy Moreau Simon Laurent Lefèvre Michel García Fournier Girard Mercier
Blanc Guérin González Rodríguez Fernández López Martínez Sánchez Pérez Gómez Díaz Hernández Ruiz
Jiménez Moreno Álvarez Romero Torres Ramos Ortega Núñez Castro Anna Peter Maria Paul Julia Karl
Sophie Luis Carmen Hugo Emma Jack Olivia Sam Max Lena Pierre Camille Diego Lucía Kim Patel Rossi
Novak Jensen Tanaka Singh Chen Silva""".split()
NAMES_HELD = """Whitfield Okafor Lindqvist Abernathy Zimmermann Köhler Vogelsang Böttcher Delacroix
Rousseau Beaumont Chevalier Villanueva Quintero Zapata Ibáñez Marlowe Priya Dmitri Fatima Greta Ingrid
Théo Noémie Joaquín Beatriz""".split()

CITIES = """London Paris Berlin Madrid Vienna Wien Zürich Lyon Sevilla Hamburg München Köln Leeds
Boston Dublin Bern Lille Nantes Bilbao Valencia Denver Oslo Rome Basel Graz Bonn Toledo""".split()
CITIES_HELD = "Glasgow Dresden Marseille Zaragoza Toronto Lisbon Leipzig Grenoble Málaga".split()

NOUNS = {
    "en": """Invoice Order Ticket Receipt Contract Delivery Parcel Payment Claim Policy Flight Report
Booking Case Letter Permit Account Lot Batch Job""".split(),
    "de": """Rechnung Auftrag Bestellung Lieferung Vertrag Paket Zahlung Bescheid Brief Akte Angebot
Quittung Mahnung Buchung Vorgang Kunde Charge Antrag""".split(),
    "fr": """Facture Commande Contrat Livraison Colis Paiement Dossier Lettre Billet Reçu Devis Lot
Réservation Compte Avis Bon Rapport""".split(),
    "es": """Factura Pedido Contrato Entrega Paquete Pago Expediente Carta Billete Recibo Lote Reserva
Cuenta Aviso Informe Presupuesto""".split(),
}
NOUNS_HELD = {
    "en": "Voucher Shipment Warrant Subscription Docket".split(),
    "de": "Gutschein Sendung Gutschrift Protokoll Mietvertrag".split(),
    "fr": "Quittance Abonnement Ordonnance Mandat".split(),
    "es": "Albarán Solicitud Póliza Multa".split(),
}

# Sentence frames. {D} is the date with the words before it, {d} the bare date; {noun}, {name},
# {city}, {n} (a number), {price}, {time}, {pct}, {phone}, {small} (1 to 99) are filled at random.
FRAMES = {
    "en": """{noun} {n} was paid {D} by Ms {name}|{noun} {n} {D}|MEETING {d} at {time}|{d}
Meeting with {name} {D}, room {small}|{name} arrived in {city} {D}|{d}: {noun} {n}, total {price}
{noun} no. {n} {D}, {price}|Please send {small} boxes by {d}|Call {name} at {phone} {D}
{d} - {name} paid {price}|The lease ends {D}|Born {D} in {city}|{name}, born {d}|Deadline: {d}, {time}
{city}, {d}|{noun} #{n} / {d} / {price}|Prices rose {pct} {D}|{D} we moved to {city}
{small} guests {D} at {time}|Best before {d}, {small} pieces|Flight {n} to {city} {D} at {time}
Dr. {name} will see you {D} at {time}|Updated {d} {time}|{d} {time} {noun} {n} closed
Valid from {d}, {pct} off|Ms {name} left {D} after {small} years|On {d}, {name} signed {noun} {n}
Room {small}, {d}|Your {noun} of {price} is due {D}|page {small}, {d}, {name}""",
    "de": """{noun} {n} {D}|{noun} {n} vom {d} über {price}|Treffen mit {name} {D} um {time} Uhr|{d}
{city}, den {d}|{D} kam {name} nach {city}|geboren {D} in {city}|{name}, geb. {d}|{d}: {noun} {n}
Termin {D}, {time} Uhr, Zimmer {small}|{noun} Nr. {n}, {d}, {price}|Bitte {small} Stück bis {d} liefern
Frau {name} hat {D} {price} bezahlt|Frist: {d}|Tel. {phone}, Anruf {D}|Stand: {d}|gültig ab {d}, {pct} Rabatt
Herr {name} zieht {D} nach {city}|Die Miete steigt {D} um {pct}|Seite {small}, {d}|{d}, {time} Uhr: {name}
Mindestens haltbar bis {d}|Zug {n} nach {city} {D}|{small} Gäste {D}|{noun} {n} ist seit {d} offen
Konto {n}, {d}, {price}|{D} um {time} in {city}|Abgabe {D}, Raum {small}""",
    "fr": """{noun} {n} {D}|{noun} n° {n} du {d}, {price}|Réunion {D} à {time} avec {name}|{d}
{city}, le {d}|né {D} à {city}|{name}, née {D}|{d} : {noun} {n}|Rendez-vous {D}, salle {small}
Mme {name} a payé {price} {D}|Date limite : {d}|Appeler {name} au {phone} {D}|Arrivée à {city} {D}
{small} colis livrés {D}|Valable du {d}, {pct} de remise|{D}, {name} signe le contrat {n}|page {small}, {d}
M. {name} part {D} pour {city}|Le loyer augmente de {pct} {D}|Vol {n} pour {city} {D} à {time}
À consommer avant {d}|{noun} {n} en attente depuis {d}|Fait à {city}, {d}|{small} personnes {D} à {time}
Mis à jour {D} à {time}|{d} - {price} - {name}""",
    "es": """{noun} {n} {D}|{noun} n.º {n} del {d}, {price}|Reunión {D} a las {time} con {name}|{d}
{city}, {d}|{city}, a {d}|nacido {D} en {city}|{name}, nacida {D}|{d}: {noun} {n}|Cita {D}, sala {small}
La Sra. {name} pagó {price} {D}|Fecha límite: {d}|Llamar a {name} al {phone} {D}|Llegada a {city} {D}
{small} cajas entregadas {D}|Válido desde {d}, {pct} de descuento|{D} {name} firmó el contrato {n}
página {small}, {d}|El Sr. {name} viaja {D} a {city}|El alquiler sube un {pct} {D}|Vuelo {n} a {city} {D}
Consumir antes de {d}|{noun} {n} pendiente desde {d}|{small} personas {D} a las {time}
Actualizado {D} a las {time}|{d} - {price} - {name}""",
}
# Counted things beside the date: quantities are the numbers most easily taken for a day or a year.
COUNTED = {
    "en": """{name} bought {small} {thing} {D} for {price}|{small} {thing} sold {D} to {name}
{name} returned {small} {thing} {D}|{name} sent {D} {small} {thing} to {city}|{D} {name} counted {small} {thing}""",
    "de": """{name} kaufte {D} {small} {thing} für {price}|{small} {thing} {D} an {name} verkauft
{name} lieferte {small} {thing} {D}|{D} schickte {name} {small} {thing} nach {city}""",
    "fr": """{name} a acheté {small} {thing} {D}|{small} {thing} vendus {D} à {name} pour {price}
{name} a rendu {D} {small} {thing}|{D}, {name} compte {small} {thing}""",
    "es": """{name} compró {small} {thing} {D}|{small} {thing} vendidas {D} a {name} por {price}
{name} devolvió {D} {small} {thing}|{D} {name} contó {small} {thing}""",
}
THINGS = {
    "en": "tables lamps shirts bottles pallets tickets cups doors bikes books tyres pens".split(),
    "de": "Tische Lampen Hemden Flaschen Paletten Karten Tassen Türen Räder Bücher Reifen Kisten".split(),
    "fr": "tables lampes chemises bouteilles palettes billets tasses portes vélos livres pneus cartons".split(),
    "es": "mesas lámparas camisas botellas cajas entradas tazas puertas libros ruedas bolsas copas".split(),
}

FRAMES, COUNTED = ({k: [f.strip() for f in v.replace("\n", "|").split("|")] for k, v in frames.items()}
                   for frames in (FRAMES, COUNTED))
FRAMES_HELD = {
    "en": ["{name} ordered {small} chairs {D} for {price}", "Inspected {d} by {name}, score {pct}"],
    "de": ["{name} bestellte {D} {small} Stühle für {price}", "Geprüft {D} von {name}, Note {small}"],
    "fr": ["{name} a commandé {small} chaises {D}", "Contrôlé {D} par {name}, {pct}"],
    "es": ["{name} encargó {small} sillas {D}", "Revisado {D} por {name}, {pct}"],
}

# Short sentences without a date, put in front of or behind some of the lines.
ASIDES = {
    "en": ["Ref. {n}", "Total {price}", "Tel. {phone}", "{noun} {n} is open", "Budget {year}", "{name}, {city}",
           "See page {small}", "Ask {name} for the other {small} files", "Thanks for your call at {time}"],
    "de": ["Az. {n}", "Summe {price}", "Tel. {phone}", "{noun} {n} ist offen", "Haushalt {year}", "{name}, {city}",
           "Siehe Seite {small}", "Bitte {name} nach {small} weiteren Akten fragen", "Danke für den Anruf um {time}"],
    "fr": ["Réf. {n}", "Total {price}", "Tél. {phone}", "{noun} {n} en cours", "Budget {year}", "{name}, {city}",
           "Voir page {small}", "Demander à {name} les {small} autres dossiers", "Merci de votre appel à {time}"],
    "es": ["Ref. {n}", "Total {price}", "Tel. {phone}", "{noun} {n} sin cerrar", "Plan {year}", "{name}, {city}",
           "Ver página {small}", "Pedir a {name} los otros {small} expedientes", "Gracias por llamar a las {time}"],
}

SYLLABLES = """an ber co da el fa gro hin is jo ka lun mi no os pre qui ra sta tor ul vin wa xe yo zu
che sch eau ño ei ill ert son mann ez ard""".split()


def bucket(text):
    return zlib.crc32(text.encode()) % BUCKETS


def two(n, rng):
    """A day or month number, with or without a leading zero."""
    return f"{n:02d}" if rng.random() < 0.6 else str(n)


def ordinal(day):
    if day in (11, 12, 13):
        return f"{day}th"
    return f"{day}" + {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


def typo(word, rng):
    """One small slip after the third letter: two letters swapped, one doubled or one left out."""
    i = rng.randrange(3, len(word) - 1)
    kind = rng.random()
    if kind < 0.4:
        return word[:i] + word[i + 1] + word[i] + word[i + 2:]
    if kind < 0.7:
        return word[:i] + word[i] + word[i:]
    return word[:i] + word[i + 1:]


class Lines:
    def __init__(self, seed, split="train"):
        assert split in ("train", "fresh", "eval")
        self.rng = random.Random(seed)
        self.split = split
        # How often there is a second sentence, how seldom a number looks like a year, how often a year
        # has four digits; and whether counted things may stand beside the date.
        self.asides, self.year_like, self.long_year, self.counted = 0.05, 0.88, 0.6, split == "fresh"

    def stage(self, step):
        """What training draws at a step. The order matters: the dates themselves are learnt on lines
        with few other numbers, hard lines and counted things come when they are known."""
        self.asides = 0.25 if step <= 2700 or step > 3500 else 0.05
        self.year_like, self.long_year = (0.80, 0.45) if step > 3500 else (0.88, 0.6)
        self.counted = step > 4500

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            text, date = self.line()
            b = bucket(text)
            right = {"eval": b == 0, "fresh": b == 1, "train": b > 1}[self.split]
            if right and len(text.encode()) <= MAX_BYTES:
                return text, date

    # ---- pieces -------------------------------------------------------------------------------

    def pick(self, common, held):
        if self.split == "eval" and self.rng.random() < 0.4:
            return self.rng.choice(held)
        return self.rng.choice(common)

    def name(self):
        if self.rng.random() < 0.25:
            return "".join(self.rng.choice(SYLLABLES) for _ in range(self.rng.randint(1, 4))).capitalize()
        return self.pick(NAMES, NAMES_HELD)

    def noun(self, lang):
        if self.rng.random() < 0.1:
            return self.name()
        return self.pick(NOUNS[lang], NOUNS_HELD[lang])

    def number(self):
        rng = self.rng
        kind = rng.random()
        n = rng.randrange(1, 10 ** rng.randint(2, 6))
        if kind < 0.7:
            return str(n)
        if kind < min(0.8, self.year_like - 0.04):
            return f"{rng.choice('ABKLRSTX')}{n}"
        if kind < self.year_like:
            return f"{rng.choice(['INV', 'RE', 'NR', 'FA', 'PO', 'LOT'])}-{n}"
        if kind < 0.94:
            return f"{rng.randint(1970, 2069)}-{rng.randrange(1000, 99999)}"
        return f"{n}/{rng.choice('ABCD')}"

    def price(self, lang):
        rng = self.rng
        whole, cents = rng.randrange(1, 10 ** rng.randint(1, 5)), rng.randrange(100)
        if lang == "en":
            body = f"{whole:,}" if rng.random() < 0.5 else str(whole)
            body += f".{cents:02d}" if rng.random() < 0.6 else ""
            return rng.choice(["${}", "£{}", "{} EUR", "USD {}", "{} GBP"]).format(body)
        body = f"{whole:,}".replace(",", "." if lang != "fr" else " ") if rng.random() < 0.4 else str(whole)
        body += f",{cents:02d}" if rng.random() < 0.6 else ""
        return rng.choice(["{} €", "{} EUR", "{}€", "{} Euro"]).format(body)

    def time(self, lang):
        rng = self.rng
        h, m = rng.randrange(24), rng.choice([0, 15, 30, 45, rng.randrange(60)])
        if lang == "en" and rng.random() < 0.4:
            return f"{h % 12 or 12}{rng.choice([' ', ''])}{rng.choice(['am', 'pm', 'p.m.'])}"
        if lang == "fr" and rng.random() < 0.6:
            return f"{h}h{m:02d}"
        if lang == "de" and rng.random() < 0.3:
            return f"{h}.{m:02d}"
        return f"{h:02d}:{m:02d}" if rng.random() < 0.5 else f"{h}:{m:02d}"

    def percent(self, lang):
        n = str(self.rng.randrange(1, 100))
        if self.rng.random() < 0.3:
            n += ("." if lang == "en" else ",") + str(self.rng.randrange(10))
        return n + self.rng.choice(["%", " %"])

    def phone(self):
        r = self.rng.randrange
        return self.rng.choice([
            lambda: f"555-{r(10000):04d}",
            lambda: f"+49 {r(30, 900)} {r(10000, 9999999)}",
            lambda: f"0{r(100, 999)} {r(100000, 9999999)}",
            lambda: f"+1 {r(200, 999)}-{r(200, 999)}-{r(10000):04d}",
            lambda: f"01 {r(10, 99)} {r(10, 99)} {r(10, 99)} {r(10, 99)}",
            lambda: f"{r(600, 799)} {r(100, 999)} {r(100, 999)}",
        ])()

    # ---- the date -----------------------------------------------------------------------------

    def day(self):
        rng = self.rng
        year = rng.randint(1970, 2069) if rng.random() < 0.5 else rng.randint(1990, 2030)
        month = rng.randint(1, 12)
        while True:
            try:
                return datetime.date(year, month, rng.randint(1, 31))
            except ValueError:
                continue

    def month(self, lang, date):
        """A month's name; the second value says that it is abbreviated."""
        rng = self.rng
        full, short = MONTHS[lang]
        if rng.random() < 0.5:
            name = full[date.month - 1]
            if len(name) >= 7 and rng.random() < 0.03:
                name = typo(name, rng)
            if lang == "de" and date.month == 1 and rng.random() < 0.1:
                name = "Jänner"
            return name, False
        return rng.choice(short[date.month - 1]), True

    def spelling(self, lang, date):
        """The date spelled out: (text, kind), kind one of "name", "month first", "numbers", "spaces"."""
        rng = self.rng
        y4 = f"{date.year}"
        d = two(date.day, rng)
        kind = rng.random()
        if kind < 0.30:  # day first, numbers only
            sep = rng.choice("///...--")
            y = y4 if rng.random() < self.long_year else y4[2:]
            gap = " " if sep == "." and rng.random() < 0.15 else ""
            return f"{d}{sep}{gap}{two(date.month, rng)}{sep}{gap}{y}", "numbers"
        if kind < 0.33:
            return f"{date.day:02d} {date.month:02d} {y4}", "spaces"
        if kind < 0.45:  # year first
            iso = rng.random()
            if iso < 0.6:
                sep = rng.choice("----/.")
                return f"{y4}{sep}{date.month:02d}{sep}{date.day:02d}", "numbers"
            if iso < 0.8:
                sep = rng.choice("-/")
                return f"{y4}{sep}{date.month}{sep}{date.day}", "numbers"
            return f"{y4}{date.month:02d}{date.day:02d}", "numbers"

        m, is_short = self.month(lang, date)
        dot = "." if is_short and rng.random() < (0.6 if lang in ("de", "fr") else 0.3) else ""
        u = rng.random()
        y = y4 if u < 0.65 else (y4[2:] if u < 0.88 else rng.choice("''’") + y4[2:])
        if rng.random() < 0.12:  # joined: 03/Mar/24, 3-Mar-2024
            sep = rng.choice("//---. ")
            y = y4 if u < 0.6 else y4[2:]
            return f"{d}{sep}{m}{sep}{y}", "name"
        if lang == "en":
            o = ordinal(date.day) if rng.random() < 0.5 else d
            comma = "," if rng.random() < 0.4 else ""
            form = rng.random()
            if form < 0.42:
                return f"{m}{dot} {o}{comma or rng.choice([',', ''])} {y}", "month first"
            if form < 0.62:
                the = "the " if rng.random() < 0.5 else ""
                return f"{the}{ordinal(date.day)} of {m}{dot}{comma} {y}", "name"
            return f"{o} {m}{dot}{comma} {y}", "name"
        if lang == "de":
            point = "." if rng.random() < 0.9 else ""
            gap = " " if not point or rng.random() < 0.85 else ""
            return f"{d}{point}{gap}{m}{dot} {y}", "name"
        if lang == "fr":
            if date.day == 1 and rng.random() < 0.8:
                d = "1er"
            return f"{d} {m}{dot} {y}", "name"
        if date.day == 1 and rng.random() < 0.4:
            d = rng.choice(["1º", "1.º", "1°"])
        form = rng.random()
        if form < 0.45:
            return f"{d} de {m}{dot} de {y}", "name"
        if form < 0.6:
            return f"{d} de {m}{dot} del {y}", "name"
        if form < 0.7:
            return f"{d} de {m}{dot} {y}", "name"
        return f"{d} {m}{dot} {y}", "name"

    def date_text(self, lang, date):
        rng = self.rng
        text, kind = self.spelling(lang, date)
        if rng.random() < 0.15:
            full, short = WEEKDAYS[lang]
            if rng.random() < 0.5:
                day = full[date.weekday()]
            else:
                day = short[date.weekday()] + ("." if rng.random() < 0.3 else "")
            if lang == "de":
                join = rng.choice([", ", ", ", " ", ", den "])
            else:
                join = rng.choice([", ", " "])
            text, kind = day + join + text, "month first" if kind == "month first" else kind
        elif kind == "numbers" and rng.random() < 0.05 and text.startswith(f"{date.year}-"):
            text += f"T{rng.randrange(24):02d}:{rng.randrange(60):02d}" + rng.choice(["", "Z", ":00", ":00Z"])
        return text, kind

    # ---- the line -----------------------------------------------------------------------------

    def row(self, lang, date):
        """Fields of a log or a table in any order, the date among them."""
        rng = self.rng
        makers = [self.number, self.name, lambda: self.price(lang), lambda: self.time(lang),
                  lambda: self.percent(lang), lambda: self.noun(lang), self.phone,
                  lambda: self.pick(CITIES, CITIES_HELD), lambda: f"{rng.randint(1, 40)} x {self.name()}"]
        fields = [rng.choice(makers)() for _ in range(rng.choice([0, 1, 1, 2]))]
        fields.insert(rng.randint(0, len(fields)), date)
        return rng.choice(["; ", ";", ", ", " | ", " - ", "\t", " / "]).join(fields)

    def line(self):
        rng = self.rng
        lang = rng.choice(LANGUAGES)
        when = self.day()
        text, kind = self.date_text(lang, when)
        before = rng.choice(BEFORE[lang])
        if text.startswith("the ") and before.endswith("the"):
            before = "on"
        led = f"{before} {text}" if kind == "spaces" or rng.random() < 0.75 else text
        bare = led if kind == "spaces" else text

        if rng.random() < 0.12:
            line = self.row(lang, bare)
        else:
            # The held-out lines meet counted things in the held-out frames only.
            common = FRAMES[lang] + COUNTED[lang] if self.counted else FRAMES[lang]
            frame = self.pick(common, FRAMES_HELD[lang])
            where = frame.find("{D}") if "{D}" in frame else frame.find("{d}")
            head, tail = frame[:where], frame[where + 3:]
            date_part = led if "{D}" in frame else bare
            head, tail = (self.fill(part, lang) for part in (head, tail))
            # A bare number right before the date would make "12 March 3, 2024" of "March 3, 2024".
            if head[-2:-1].isdigit() and date_part == text:
                head = head[:-1] + rng.choice([", ", ": ", " - ", f" {before} "])
            line = head + date_part + tail
        if rng.random() < self.asides:
            aside = self.fill(rng.choice(ASIDES[lang]), lang)
            end = rng.choice([". ", ". ", "; ", ": "])
            line = f"{aside}{end}{line}" if rng.random() < 0.5 else f"{line}{end}{aside}"
        return self.roughen(line, lang), when.isoformat()

    def fill(self, frame, lang):
        rng = self.rng
        for slot, make in (("{noun}", lambda: self.noun(lang)), ("{name}", self.name),
                           ("{city}", lambda: self.pick(CITIES, CITIES_HELD)), ("{n}", self.number),
                           ("{price}", lambda: self.price(lang)), ("{time}", lambda: self.time(lang)),
                           ("{pct}", lambda: self.percent(lang)), ("{phone}", self.phone),
                           ("{thing}", lambda: rng.choice(THINGS[lang])),
                           ("{year}", lambda: str(rng.randint(1970, 2069))),
                           ("{small}", lambda: str(rng.randint(1, 99)))):
            if slot in frame:
                frame = frame.replace(slot, make())
        return frame

    def roughen(self, line, lang):
        """Case, accents, final punctuation, doubled spaces and slips of the pen."""
        rng = self.rng
        if rng.random() < 0.3:
            line += rng.choice([".", ".", "!", ";", " ok", "?"])
        r = rng.random()
        if r < 0.08 and lang == "de":
            for a, b in (("ä", "ae"), ("ö", "oe"), ("ü", "ue"), ("ß", "ss"), ("Ä", "Ae"), ("Ö", "Oe"), ("Ü", "Ue")):
                line = line.replace(a, b)
        elif r < 0.2:
            line = "".join(c for c in unicodedata.normalize("NFD", line) if not unicodedata.combining(c))
        r = rng.random()
        if r < 0.08:
            line = line.upper()
        elif r < 0.18:
            line = line.lower()
        elif r < 0.20:
            line = line.title()
        elif r < 0.5:
            line = line[:1].upper() + line[1:]
        if rng.random() < 0.06:
            at = [i for i, c in enumerate(line) if c == " "]
            if at:
                i = rng.choice(at)
                line = line[:i] + " " + line[i:]
        if rng.random() < 0.05:
            words = line.split(" ")
            at = [i for i, w in enumerate(words) if len(w) >= 5 and w.isalpha() and not is_month(w)]
            if at:
                i = rng.choice(at)
                words[i] = typo(words[i], rng)
                line = " ".join(words)
        return line.strip()


def plain(word):
    return "".join(c for c in unicodedata.normalize("NFD", word.lower()) if not unicodedata.combining(c))


MONTH_STEMS = {plain(m)[:3] for full, _ in MONTHS.values() for m in full}


def is_month(word):
    return plain(word)[:3] in MONTH_STEMS


if __name__ == "__main__":  # a look at the data: python3 data.py [split] [seed] [count]
    import sys
    split, seed, count = (sys.argv[1:] + ["train", "1", "40"][len(sys.argv) - 1:])[:3]
    lines = Lines(int(seed), split)
    for _ in range(int(count)):
        text, date = next(lines)
        print(date, text)
