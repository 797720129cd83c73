"""Abbreviations, acronyms, Roman numerals, streets and saints: words not read as written."""

from __future__ import annotations

import re
from re import Match

from audio.text.normalize.numbers import cardinal, ordinal, roman_value
from audio.text.normalize.web import spell
from audio.text.word_set import word_set

# Written with a period, or without one where no word looks the same.
_ABBREVIATIONS = {
    "e.g.": "for example", "eg.": "for example", "i.e.": "that is", "ie.": "that is",
    "etc.": "et cetera", "etc": "et cetera", "vs.": "versus", "vs": "versus",
    "approx.": "approximately", "approx": "approximately", "a.k.a.": "also known as",
    "aka": "also known as", "et al.": "and others", "cf.": "compare", "viz.": "namely",
    "ca.": "circa", "c.": "circa", "w/o": "without", "w/": "with", "b/c": "because",
    "n/a": "not applicable", "N/A": "not applicable", "Mr.": "Mister", "Mr": "Mister",
    "Mrs.": "Missus", "Mrs": "Missus", "Ms.": "Miz", "Ms": "Miz", "Prof.": "Professor",
    "Jr.": "Junior", "Jr": "Junior", "Sr.": "Senior", "Sgt.": "Sergeant", "Capt.": "Captain",
    "Lt.": "Lieutenant", "Col.": "Colonel", "Gen.": "General", "Maj.": "Major", "Gov.": "Governor",
    "Sen.": "Senator", "Rep.": "Representative", "Rev.": "Reverend", "Hon.": "Honorable",
    "Pres.": "President", "Messrs.": "Messieurs", "Mt.": "Mount", "Ft.": "Fort",
    "Inc.": "Incorporated", "Ltd.": "Limited", "Corp.": "Corporation", "Co.": "Company",
    "Bros.": "Brothers", "dept.": "department", "Dept.": "Department", "govt.": "government",
    "Govt.": "Government", "est.": "estimated", "Est.": "Established", "misc.": "miscellaneous",
    "temp.": "temperature", "avg.": "average", "avg": "average", "max.": "maximum",
    "min.": "minimum", "incl.": "including", "excl.": "excluding", "esp.": "especially",
    "ed.": "edition", "fig.": "figure", "Fig.": "Figure", "vol.": "volume", "Vol.": "Volume",
    "ch.": "chapter", "Ch.": "Chapter", "sec.": "section", "Sec.": "Section", "pp.": "pages",
    "p.": "page", "pg.": "page", "ext.": "extension", "Ext.": "Extension", "tel.": "telephone",
    "Tel.": "Telephone", "appt.": "appointment", "Apt.": "Apartment", "apt.": "apartment",
    "Apt": "Apartment", "Ste.": "Suite", "Rm.": "Room", "Ave.": "Avenue", "Ave": "Avenue",
    "Blvd.": "Boulevard", "Blvd": "Boulevard", "Rd.": "Road", "Rd": "Road", "Ln.": "Lane",
    "Hwy.": "Highway", "Hwy": "Highway", "Pkwy.": "Parkway", "Pkwy": "Parkway", "Pl.": "Place",
    "Ct.": "Court", "Sq.": "Square", "Univ.": "University", "Assn.": "Association",
    "intl.": "international", "Intl.": "International", "Ph.D.": "P H D", "PhD": "P H D",
    "M.D.": "M D", "B.C.": "B C", "A.D.": "A D", "P.S.": "P S", "a.m.": "A M", "p.m.": "P M",
    "hrs.": "hours", "mins.": "minutes", "yrs.": "years", "lbs.": "pounds", "lb.": "pounds",
    "oz.": "ounces", "ft.": "feet", "no.": "number", "OK": "okay", "ok": "okay", "Wi-Fi": "Wi Fi",
    "WiFi": "Wi Fi", "wifi": "Wi Fi", "Wifi": "Wi Fi", "iOS": "i O S", "macOS": "mac O S",
    "iPadOS": "i Pad O S", "IoT": "I o T", "LaTeX": "lay tech", "GIF": "gif", "JPEG": "jay peg",
    "C#": "C sharp", "F#": "F sharp", "C++": "C plus plus", "g++": "G plus plus",
    ".NET": "dot net", "I/O": "I O", "A/C": "A C", "TCP/IP": "T C P I P", "and/or": "and or",
    "he/she": "he or she", "she/he": "she or he", "his/her": "his or her", "him/her": "him or her",
    "s/he": "she or he", "yes/no": "yes or no", "true/false": "true or false",
    "24/7": "twenty four seven",
    "9/11": "nine eleven", "50/50": "fifty fifty", "Q&A": "Q and A", "R&D": "R and D",
    "AT&T": "A T and T", "Q&As": "Q and A's",
}  # fmt: skip
# These are also words, names or ends of sentences; they need a figure behind them.
_NEEDS_FIGURE = word_set("c. ch. Ch. sec. Sec. p. pp. pg. no. vol. Vol. ed. fig. Fig.")
_UNITS = word_set("hrs. mins. yrs. lbs. lb. oz. ft. min.")
_MAY_END = word_set(
    "etc. Inc. Ltd. Co. Corp. Bros. Jr. Sr. Ave. Blvd. Rd. Ln. Sq. a.m. p.m. dept. Dept. govt. "
    "hrs. mins. yrs. lbs. lb. oz. ft. max. min. misc. avg. appt. Ph.D. M.D. B.C. A.D. tel."
) | {"et al."}
_NEEDS_NAME = word_set(
    "Gen. Col. Maj. Gov. Sen. Rep. Rev. Hon. Pres. Mt. Ft. Est. Apt Apt. Ste. Ct. Pl."
)
_ABBREVIATION = re.compile(
    r"(?<![\w/@&])(?<!slash )(?<!dot )(?:"
    + "|".join(re.escape(a) for a in sorted(_ABBREVIATIONS, key=len, reverse=True))
    + r")(?![\w/&+#])"
)

_SAINTS = (
    "Andrew|Andrews|Anne|Anthony|Augustine|Barts|Basil|Bernard|Catharines|Catherine|Charles|Clair|"
    "Cloud|Croix|Denis|Elizabeth|Elmo|Francis|George|Georges|Germain|Helena|Helens|Ives|James|Joe|"
    "John|Johns|Joseph|Kitts|Lawrence|Louis|Lucia|Luke|Maarten|Mark|Martin|Mary|Matthew|Michael|"
    "Moritz|Nicholas|Nick|Pancras|Patrick|Paul|Pauls|Peter|Peters|Petersburg|Petersburgh|Pierre|"
    "Stephen|Thomas|Tropez|Valentine|Vincent"
)
_SAINT = re.compile(rf"\bSt\.? (?={_SAINTS}\b)|(?:(?<=^)|(?<=[a-z,;:] )|(?<=\. ))St\. (?=[A-Z])")
_STREET = re.compile(
    r"((?:[A-Z][\w'-]+|\d(?:st|nd|rd|th)|first|second|third|fourth|fifth|sixth|seventh|eighth"
    r"|ninth|tenth) )"
    r"St\b(?:\.(?=,| [a-z]| (?:Apt|Suite|Ste|NE|NW|SE|SW)\b)|\.?)"
)
_DRIVE = re.compile(r"((?<![.!?] )[A-Z][a-z]+ )Dr\b(?:\.(?=,| [a-z]|$)|(?=,|$))")
_DOCTOR = re.compile(r"\bDr\.? (?=[A-Z])|\bDr\.(?=\s|$)")
_DIRECTION_BEFORE = re.compile(
    r"(\b(?:\d+|ty|een|one|two|three|four|five|six|seven|eight|nine|red)) (N|S|E|W|NE|NW|SE"
    r"|SW)\.? (?=(?:[A-Z][a-z]|\d+(?:st|nd|rd|th)))"
)
_DIRECTION_AFTER = re.compile(
    r"(\b(?:Street|Avenue|Road|Drive|Boulevard|Lane)),? (N|S|E|W|NE|NW|SE|SW)\b\.?"
)
_DIRECTIONS = {
    "N": "North", "S": "South", "E": "East", "W": "West", "NE": "Northeast",
    "NW": "Northwest", "SE": "Southeast", "SW": "Southwest",
}  # fmt: skip
_STATES = {
    "AL": "Alabama", "AK": "Alaska", "AZ": "Arizona", "AR": "Arkansas", "CA": "California",
    "CO": "Colorado", "CT": "Connecticut", "DE": "Delaware", "FL": "Florida", "GA": "Georgia",
    "HI": "Hawaii", "ID": "Idaho", "IL": "Illinois", "IN": "Indiana", "IA": "Iowa",
    "KS": "Kansas", "KY": "Kentucky", "LA": "Louisiana", "ME": "Maine", "MD": "Maryland",
    "MA": "Massachusetts", "MI": "Michigan", "MN": "Minnesota", "MS": "Mississippi",
    "MO": "Missouri", "MT": "Montana", "NE": "Nebraska", "NV": "Nevada", "NH": "New Hampshire",
    "NJ": "New Jersey", "NM": "New Mexico", "NY": "New York", "NC": "North Carolina",
    "ND": "North Dakota", "OH": "Ohio", "OK": "Oklahoma", "OR": "Oregon", "PA": "Pennsylvania",
    "RI": "Rhode Island", "SC": "South Carolina", "SD": "South Dakota", "TN": "Tennessee",
    "TX": "Texas", "UT": "Utah", "VT": "Vermont", "VA": "Virginia", "WA": "Washington",
    "WV": "West Virginia", "WI": "Wisconsin", "WY": "Wyoming", "DC": "D C",
}  # fmt: skip
_STATE = re.compile(rf"(?<=[a-z], )({'|'.join(_STATES)})\b(?= \w+ \w+ \w+ \w+ \w+|[.,;!?]|$| \d)")

_REGNAL = (
    "Alexander|Alfonso|Benedict|Carl|Carlos|Catherine|Charles|Christian|Clement|Darius|Edward|"
    "Elizabeth|Felipe|Ferdinand|Francis|Franz|Frederick|George|Gregory|Gustav|Haakon|Harald|Henri|"
    "Henry|Innocent|Ivan|James|John|Joseph|Juan|Julius|Leo|Leopold|Louis|Margrethe|Mary|"
    "Maximilian|Mehmed|Napoleon|Nicholas|Olav|Otto|Paul|Pedro|Peter|Philip|Philippe|Pius|Ptolemy|"
    "Ramesses|Ramses|Richard|Robert|Rudolf|Sixtus|Thutmose|Tutmose|Umberto|Urban|Victoria|Vittorio|"
    "Wilhelm|William|Xerxes"
)
_REGNAL_RE = re.compile(
    rf"\b((?:{_REGNAL}|(?:King|Queen|Pope|Emperor|Empress|Tsar|Kaiser|Sultan) [A-Z][a-z]+) )"
    rf"([IVX]+)\b(?!\.\w)(?!')"
)
_COUNTED_RE = re.compile(
    r"\b((?i:war|chapter|part|volume|vol\.|act|scene|section|article|phase|type|class|level|stage|"
    r"book|episode|season|tier|grade|title|appendix|figure|table|bowl|fantasy|rocky|apollo|mark|"
    r"iphone|amendment|corps|quake|league|schedule|group) )([IVXLC]+)\b(?!')"
)
_NAMED_RE = re.compile(r"\b([A-Z][a-z]+ )((?=[IVXL]{2,})[IVXL]+)\b(?!')")
_TITLE_BEFORE = re.compile(r"(?:King|Queen|Pope|Emperor|Empress|Tsar|Kaiser|Sultan) $")
_CENTURY_RE = re.compile(r"\b([IVX]+)(?:th)? (?=[Cc]entur)")

_ACRONYM = re.compile(r"(?<![\w'&/])([A-Z]{2,})('?s)?(?![\w])")
_DOTTED_LETTERS = re.compile(r"\b(?:[A-Za-z]\.){2,}(?:[A-Za-z]\b)?")
_INITIAL = re.compile(
    r"(?<![A-Z] )(?<!lan )(?<!art )(?<!ion )(?<!min )(?<!ype )(?<!ass )(?<!ade )(?<!eam )(?<!oup )"
    r"(?<!tis )\b[A-HJ-Z]\.(?= [A-Z]|,)"  # plan B., option C., vitamin D. and such end sentences
)
_VOWELS = re.compile(r"[AEIOUY]")
_SPELLED = word_set(
    "AAA AARP ACLU AFAIK AI AM API APR ASAP ASPCA ATM AWS BBC CEO CET CIA CIO CLI CNN COO CPR CPU "
    "CSS CST CTO DIY DNA DOB EDT EOD ESPN EST ETA EU EV FAQ FBI FCC FDA FYI GDP GMT GPU GUI HDMI "
    "HIV HOA HR HTML HTTP HTTPS IBM ICU ID IEEE IIRC IMDB IMO IOU IP IPA IPO IQ IRA IRS ISBN ISO "
    "ISP IT IUCN LCD LED LGBTQ MIT MRI MST NBA NYC OCD OEM OLED ORM PDA PDT PM POV PST QA RNA ROI "
    "RSVP SAT SEO SLA SPF SQL SSD SUV TBA TBD TV UAE UAV UCLA UFO UI UK UN UPS URI URL US USA USB "
    "USPS UTC UV UX VIP VOIP YMCA"
)
_SAID = word_set(
    "ACORN AIDS ASCII BASIC BIOS CAPTCHA COBOL COVID CRISPR DARPA FAFSA FEMA FERPA FIFA GAAP "
    "HIPAA IKEA ISIS JSON LAN LASER LEGO LIDAR MAC MENSA NAFTA NASA NASCAR NASDAQ NATO NAVY NIMBY "
    "NORAD OPEC OSHA PAC PIN RADAR RAM REM REST ROM SALT SARS SCUBA SIM SOAP SONAR SWAT TASER "
    "TOEFL UNESCO UNICEF VIN WAN WASP YOLO ZIP"
)
_SHOUTED = word_set(
    "A AH ALL AN AND ANY ARE AS ASK AT BAD BE BIG BUT BUY BY CALL CAN DAY DID DO DON END FAR FEW "
    "FOR FREE GET GO GOT HA HAD HAS HE HELP HER HEY HIM HIS HOT HOW IF IN IS ITS JOB JUST LET LOT "
    "LOW MAN MAY ME MEN MY NEW NO NOT NOW OF OFF OH OLD ON ONE ONLY OR OUR OUT OWN PAY PUT RUN "
    "SAW SAY SEE SET SHE SIT SO STOP SUN TEN THAN THAT THE THEN THEY THIS TO TOO TOP TRY TWO UP "
    "USE VERY WAR WAS WAY WE WHAT WHEN WHO WHY WILL WITH WON YES YET YOU YOUR"
)


def _say_abbreviation(match: Match[str]) -> str:
    text = match[0]
    before, after = match.string[: match.start()], match.string[match.end() :]
    rest = after.lstrip()
    if text in _NEEDS_FIGURE and not rest[:1].isdigit():
        return text
    if text in _UNITS and re.search(r"\d ?$", before):
        return text  # the pass for measures knows the number
    if text in _NEEDS_NAME and not (rest[:1].isupper() or rest[:1].isdigit()):
        return text
    words = _ABBREVIATIONS[text]
    ends = text.endswith(".") and (
        not rest
        or rest[0] in "\"')"
        or after[0] == "\n"
        or (text in _MAY_END and rest[0].isupper())
    )
    return words + ("." if ends else "")


def _say_drive(match: Match[str]) -> str:
    return f"{match[1]}Drive" + ("." if match[0].endswith(".") else "")


def _say_street(match: Match[str]) -> str:
    rest = match.string[match.end() :]
    ends = match[0].endswith(".") and (not rest or rest[0] == "\n" or rest[:2].strip().isupper())
    return f"{match[1]}Street" + ("." if ends else "")


def _say_regnal(match: Match[str]) -> str:
    value = roman_value(match[2])
    is_pronoun = match[2] == "I" and match[1].count(" ") == 1
    if value is None or (is_pronoun and not _TITLE_BEFORE.search(match.string[: match.start()])):
        return match[0]
    return f"{match[1]}the {ordinal(value)}"


def _say_counted(match: Match[str]) -> str:
    value = roman_value(match[2])
    return match[0] if value is None else match[1] + cardinal(value)


def _say_century(match: Match[str]) -> str:
    value = roman_value(match[1])
    return match[0] if value is None else ordinal(value) + " "


def _say_acronym(match: Match[str]) -> str:
    word, ending = match[1], match[2] or ""
    if word in _SHOUTED and not ending:
        return word
    if word in _SAID:
        return word + ending
    if word not in _SPELLED:
        # Someone who shouts has neighbours in capitals; a long word with vowels is a word.
        around = match.string[max(0, match.start() - 12) : match.start()]
        behind = match.string[match.end() : match.end() + 12]
        shouts = re.search(r"\b[A-Z]{4,}[ !,]*$", around) or re.match(r"[ !,]*[A-Z]{4,}\b", behind)
        if _VOWELS.search(word) and (len(word) > 4 or (shouts and len(word) > 2)):
            return match[0]
        if len(word) == 4 and re.fullmatch(r"[^AEIOUY]*[AEIOU]{1,2}[^AEIOUY]+[EY]?", word):
            return match[0]
        if len(word) > 6:
            return match[0]
    letters = spell(word)
    return f"{letters}'s" if ending else letters


def _say_dotted(match: Match[str]) -> str:
    letters = spell(match[0].replace(".", ""))
    rest = match.string[match.end() :].lstrip()
    return letters + ("." if match[0].endswith(".") and not rest else "")


def expand_addresses_on_streets(text: str) -> str:
    """Streets, saints, doctors, directions and states; before figures become words."""
    if "St" in text:
        text = _SAINT.sub("Saint ", text)
        text = _STREET.sub(_say_street, text)
    if "Dr" in text:
        text = _DRIVE.sub(_say_drive, text)
        text = _DOCTOR.sub(lambda m: "Doctor" + (" " if m[0].endswith(" ") else ""), text)
    text = _DIRECTION_BEFORE.sub(lambda m: f"{m[1]} {_DIRECTIONS[m[2]]} ", text)
    return _STATE.sub(lambda m: _STATES[m[1]], text)


def expand_abbreviations(text: str) -> str:
    """``Dr.``, ``approx.``, and directions behind the name of a street."""
    text = _ABBREVIATION.sub(_say_abbreviation, text)
    return _DIRECTION_AFTER.sub(
        lambda m: f"{m[1]} {_DIRECTIONS[m[2]]}" + ("." if m[0].endswith(".") else ""), text
    )


def expand_roman(text: str) -> str:
    """``Henry VIII`` "Henry the eighth", ``World War II`` "World War two"."""
    if not re.search(r"\b[IVXLC]+\b", text):
        return text
    text = _CENTURY_RE.sub(_say_century, text)
    text = _COUNTED_RE.sub(_say_counted, text)
    text = _REGNAL_RE.sub(_say_regnal, text)
    return _NAMED_RE.sub(_say_counted, text)


def expand_letters(text: str) -> str:
    """Acronyms and initials, letter by letter."""
    if "." in text:
        text = _DOTTED_LETTERS.sub(_say_dotted, text)
        text = _INITIAL.sub(lambda m: m[0].replace(".", ""), text)
    return _ACRONYM.sub(_say_acronym, text)
