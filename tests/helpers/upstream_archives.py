"""Tar archives, and made-up newsgroups in one with their counts, for the tests of the downloads."""

import io
import re
import tarfile
from collections import Counter

import numpy as np

NEWSGROUPS = ["alt.atheism", "comp.sys.mac.hardware", "sci.med"]


def tar_gz(members, links=(), **kwargs):
    """A gzipped tar archive of contents by path, where None stands for a folder, and of links to nowhere."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", **kwargs) as archive:
        for path, content in members.items():
            info = tarfile.TarInfo(path)
            info.size = len(content or b"")
            if content is None:
                info.type = tarfile.DIRTYPE
            archive.addfile(info, io.BytesIO(content or b""))
        for path in links:
            info = tarfile.TarInfo(path)
            info.type, info.linkname = tarfile.SYMTYPE, "nowhere"
            archive.addfile(info)
    return stream.getvalue()


def newsgroups():
    """Fifty made-up messages by class and file number."""
    rng = np.random.default_rng(2)
    # Words by the number of messages that hold them: at, and one beyond, each bound of the document frequency.
    header = {"four": 4, "five": 5, "often": 45, "oftener": 46, "Host": 30}
    body = {"nineteen": 19, "twenty": 20, "many": 45, "more": 46, "host": 25, "I've": 30, "_not_": 30, "snake_case": 30}
    body |= {"abc123": 30, "b" * 20: 30, "c" * 21: 30, "don\xd5t": 30, "na\xefve": 30, "\xff": 30, "then\n\nagain": 30}
    chosen = [{word: set(1 + rng.permutation(49)[:n]) for word, n in words.items()} for words in (header, body)]
    messages = {}
    for i in range(50):
        head, text = ([w for w, rows in words.items() if i in rows for _ in range(rng.integers(1, 4))] for words in chosen)
        lines = [f"From: j\xfcrgen{i}@x.edu", f"Subject: {' '.join(head)}", f"Lines: {i}"]
        lines += ["", f">{', '.join(text)}."] if i else ["X-Last: no blank line, no body"]
        number = 9999 if i == 3 else 51000 + 7 * i % 50
        messages[NEWSGROUPS[i % 3], number] = "\n".join(lines).encode("latin-1")
    return messages


def count_newsgroups(messages):
    """The arrays of the data set, by plain counting."""

    def count(texts, fewest):
        counts = [Counter(words) for words in texts]
        frequency = Counter(word for count in counts for word in count)
        vocabulary = sorted(word for word, n in frequency.items() if fewest <= n <= 0.9 * len(texts))
        return [[count[word] for word in vocabulary] for count in counts], np.array(vocabulary)

    order = sorted((NEWSGROUPS.index(name), number) for name, number in messages)
    texts = [messages[NEWSGROUPS[label], number].decode("latin-1").lower() for label, number in order]
    X, vocabulary = count([re.findall(r"\w{2,}", text) for text in texts], 0.1 * len(texts))
    bodies = [re.findall(r"\w+", text[text.find("\n\n") :] if "\n\n" in text else "") for text in texts]
    body, body_vocabulary = count([[w for w in words if re.fullmatch("[a-z]{2,20}", w)] for words in bodies], 20)
    entries = [[(column, n) for column, n in enumerate(row) if n] for row in body]
    return {
        "X": np.array(X, np.int16),
        "vocabulary": vocabulary,
        "y": np.array([label for label, _ in order], np.int8),
        "class_names": np.array(NEWSGROUPS),
        "doc_id": np.array([str(number) for _, number in order]),
        "body_csr_data": np.array([n for row in entries for _, n in row], np.int16),
        "body_csr_indices": np.array([column for row in entries for column, _ in row], np.int32),
        "body_csr_indptr": np.cumsum([0, *map(len, entries)]),
        "body_vocabulary": body_vocabulary,
    }


def newsgroups_archive(messages):
    """An archive as the host makes it: a global header, one folder on top; beside the messages, members to be skipped."""
    top, folder = "dataMining20NewsGroup-1f791d1", "20news-bydate/20news-bydate-train"
    other = b"Subject: other\n\nnot to be counted"
    members = {top: None, f"{top}/{folder}/sci.med": None, f"{top}/{folder}/sci.med/58999": None}
    skipped = ["sci.med/._51000", "sci.med/51000.txt", "sci.med/51000/1", "sci.space/51000", "sci.med/../../1", "51000"]
    members |= {f"{top}/{folder}/{path}": other for path in skipped}
    members |= {f"{top}/20news-bydate/20news-bydate-test/sci.med/1": other, f"/{top}/{folder}/sci.med/2": other, "1": other}
    members |= {f"{top}/{folder}/{name}/{number}": text for (name, number), text in messages.items()}
    return tar_gz(members, [f"{top}/{folder}/sci.med/58998"], format=tarfile.PAX_FORMAT, pax_headers={"comment": "1f791d1"})
