import re


def last_number(text):
    found = re.findall(r"-?[0-9.,]+", text)
    return found[-1] if found else None
