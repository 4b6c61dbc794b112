"""Registry of the data sets: descriptions, upstream files, and digests of the arrays."""

from pyro_lvgp.datasets import _parse_images, _parse_r, _parse_text
from pyro_lvgp.datasets._entry import Entry, at

_WINE_UNITS = {
    "X": "physico-chemical measurements: acids, sugar, chlorides, sulphates [g/dm³], SO₂ [mg/dm³], density [g/cm³], "
    "pH, alcohol [% vol]",
    "y": "quality, 3 to 9",
    "columns": "names of X's columns",
}
_WINE_CITATION = "Cortez et al., Decision Support Systems 47 (2009)"
_WINE_LICENCE = "CC BY 4.0 at UCI (recalled, not checked)"
_WINE = ("choux130/Wine-Quality-Dataset", "a15e9b58edd3141ab5b8a6182eb8a5a65d56fc5c")
_RFLVM = ("gwgundersen/rflvm", "5ac15101f2")
_CIFAR = ("taneishi/convnetjs", "f741ae53fe")
_CIFAR_LABELS = "demo/cifar10/cifar10_labels.js"
_CIFAR_CITATION = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009)"
_NO_LICENCE = "none stated"

REGISTRY: dict[str, Entry] = {
    "oilflow": Entry(
        description="Three-phase oil flow, training set: simulated gamma densitometry of a pipe.",
        units={
            "X": "densitometer readings [dimensionless]",
            "y": "flow regime 0, 1, 2 (the source does not say which is which)",
            "y_onehot": "the original one-hot coding",
            "fractions": "two of the three phase volume fractions [dimensionless]",
            "columns": "placeholder names of X's columns",
        },
        citation="Bishop and James, Nuclear Instruments and Methods in Physics Research A 327 (1993)",
        licence="none stated with the data; the repository is MIT",
        files=at("cornellius-gp/gpytorch", "7c4ec80f0f", "examples/045_GPLVM/3PhData.tar.gz"),
        parse=_parse_text.parse_oilflow,
        sha256="8dc147332332900baac074763c35279294a372690114e84eb0629bf7c3397c44",
        digest="02aa58cd201a8cc49dac705f826d263c9e7969a11ccf69089b1227017938a202",
    ),
    "eeg": Entry(
        description="UCI EEG database, control subject co2c0000337, trial 0 (condition S1 obj).",
        units={
            "t": "time [s], 256 samples per second",
            "Y": "voltages of seven frontal electrodes [µV]",
            "columns": "electrodes of Y",
            "test_mask": "True at the 300 entries to predict: last 100 samples of FZ, F1, F2",
            "Y_all": "voltages of all 64 channels [µV]",
            "columns_all": "channels of Y_all (X, Y and nd are not scalp positions)",
            "subject": "subject identifier",
            "trial": "trial number",
            "condition": "stimulus condition",
        },
        citation="Begleiter, EEG Database, UCI; Zhang et al., Brain Research Bulletin 38 (1995)",
        licence="CC BY 4.0 at UCI (recalled, not checked)",
        files=at("seredes/EEG_data", "ccdf1fa767", "SMNI_CMI_TRAIN/co2c0000337/co2c0000337.rd.000.gz"),
        parse=_parse_text.parse_eeg,
        sha256="96d21a0c136f182e022edca4ef1a1baa8beb25a3eb87ca64a2a48ba05c07826f",
        digest="953cbfbe3c6cce7d127b0399e3ba7c9c27a5b9aae0debc64f91269eda4bf806b",
    ),
    "jura": Entry(
        description="Heavy metals in the topsoil of the Swiss Jura: 259 prediction and 100 validation sites.",
        units={
            "X": "site, local grid [km]",
            "Y": "concentrations of seven metals [mg/kg]",
            "columns": "metals of Y",
            "X_columns": "names of X's columns",
            "is_validation": "True at the 100 validation sites, which come last",
            "test_mask": "True for Cd at the validation sites",
            "landuse": "land use, code",
            "rock": "rock type, code",
            "landuse_name": "land use",
            "rock_name": "rock type",
            "lonlat": "longitude and latitude, WGS84 [degrees]",
        },
        citation="Goovaerts, Geostatistics for Natural Resources Evaluation (1997); Atteia et al. (1994); Webster "
        "et al. (1994)",
        licence="package gstat, GPL (>= 2)",
        files=at("cran/gstat", "e65dbf2a89", "data/jura.rda"),
        parse=_parse_r.parse_jura,
        sha256="6a08d9752fb820e0f8ddd2f0fc50f9d944b64bbbcf7979cf5d91642e25c66c72",
        digest="91fffdd29689e5951235c78c2a6efb16d342b263970ede07f4040ec0a19f4d5b",
    ),
    "weather_trentino": Entry(
        description="Daily weather at 59 stations in and around Trentino, 1958 to 2007: not the Japanese stations of "
        "the GP-VAE thesis, but a task of the same structure.",
        units={
            "Y": "day × station × variable: precipitation [mm], maximum and minimum temperature [°C]",
            "columns": "variables of Y",
            "dates": "consecutive days",
            "lat": "latitude [degrees]",
            "lon": "longitude [degrees]",
            "elev": "elevation [m]",
            "station": "station identifiers",
            "location": "place names, cut at 20 characters in the source",
        },
        citation="Cordano and Eccel, RMAWGEN",
        licence='package RMAWGEN, GPL (>= 2); data "for research purposes only" (Provincia Autonoma di Trento, '
        "Fondazione Edmund Mach, Provincia Autonoma di Bolzano, ARPA Lombardia, ARPA Veneto)",
        files=at("cran/RMAWGEN", "96343288a6", "data/trentino.rda"),
        parse=_parse_r.parse_weather_trentino,
        sha256="be81c07baa8b6c540041c225746f837270d5e437be41bba5bb8e89ba02e376da",
        digest="e5caa1892b667855aeedabf6352c9584d2d5b29ae0145f3a98cf6e177a52168e",
    ),
    "frey": Entry(
        description="Brendan Frey's face: 1965 consecutive video frames.",
        units={"X": "grey levels 0 to 255, 28 × 20 images by rows", "image_shape": "height and width [pixels]"},
        citation="Roweis and Saul, Science 290 (2000)",
        licence=_NO_LICENCE,
        files=at("SheffieldML/GPmat", "4b5914a38e", "datasets/data/frey_rawface.mat"),
        parse=_parse_images.parse_frey,
        sha256="aad453aaa7efadc9e2a00a20f069369245ea0ece33ebdf5f833197574deadafe",
        digest="9af7027517ca6e54b74724093634f51490d5d65885122762c67f09ee4bcfb58b",
    ),
    "mnist": Entry(
        description="MNIST handwritten digits, complete and in the original order.",
        units={
            "X_train": "grey levels 0 to 255, 28 × 28 images by rows",
            "y_train": "digits",
            "X_test": "grey levels 0 to 255, 28 × 28 images by rows",
            "y_test": "digits",
            "image_shape": "height and width [pixels]",
        },
        citation="LeCun, Bottou, Bengio, Haffner, Proceedings of the IEEE 86 (1998)",
        licence="CC BY-SA 3.0 (recalled, not checked)",
        files=at(
            "karpathy/convnetjs",
            "b0d19208e1a7a578fd3988b0829109d5f8720ec4",
            *(f"demo/mnist/mnist_batch_{i}.png" for i in range(20)),  # 3000 images each; batch 20 is of the test set
            "demo/mnist/mnist_labels.js",
        )
        + at(
            "kelas/mnist",
            "283b387221ab46655e600cfcc25d843bb14292b9",
            "t10k-images-idx3-ubyte.gz",
            "t10k-labels-idx1-ubyte.gz",
        ),
        parse=_parse_images.parse_mnist,
        sha256="553a80b0aaee5d45a23bbc9db3ed68be284f19e2d30e5bee8dc319ebb7137f1c",
        digest="590dee301a3e3a9c75b4e189a9da345c6bc9db24184f7cb75f57293318467f19",
    ),
    "wine_red": Entry(
        description='UCI wine quality, red "Vinho Verde".',
        units=_WINE_UNITS,
        citation=_WINE_CITATION,
        licence=_WINE_LICENCE,
        files=at(*_WINE, "winequality-red.csv"),
        parse=_parse_text.parse_wine,
        sha256="04795cc7fa5d2e333066d78f1c4706d3c914f61d1c944707dece85af4f85abe6",
        digest="fe0464d9279207cea3dff66cd2a71f1822c97a9ac1bff96bcf62e19ca49e9f15",
    ),
    "wine_white": Entry(
        description='UCI wine quality, white "Vinho Verde".',
        units=_WINE_UNITS,
        citation=_WINE_CITATION,
        licence=_WINE_LICENCE,
        files=at(*_WINE, "winequality-white.csv"),
        parse=_parse_text.parse_wine,
        sha256="66a8592ade5118cd3f0f0b70c908d6a49cb69230a8fa610df4968566dfae1623",
        digest="b4ad26d30245911bb3037b0700a01ee005935590564c5bc016d672f8215933da",
    ),
    "bridges": Entry(
        description="Daily bicycle counts on four East River bridges, New York, 2017-04-01 to 2017-10-31.",
        units={
            "Y": "bicycles per day",
            "y": "1 on weekdays, 0 at weekends",
            "columns": "bridges of Y, in the order of the public table (the file does not name them)",
            "dates": "days, inferred from the weekday labels",
        },
        citation="NYC DOT, Bicycle Counts for East River Bridges; Gundersen, Zhang, Engelhardt, AISTATS (2021)",
        licence="NYC Open Data (public)",
        files=at(*_RFLVM, "datasets/bridges.npy"),
        parse=_parse_text.parse_bridges,
        sha256="3f372c1bbb3274ca2faae46c50c6d96bd9a71ba3c5bc981f3648da74403328c4",
        digest="c1dca9587ef99187bcfa1f26b1ce330dc6dd5cee510c662e8c63a81779a3e496",
    ),
    "montreal": Entry(
        description="Daily bicycle counts on Montreal's cycle lanes: 2013 (eight lanes), 2012 and 2015.",
        units={
            "Y": "bicycles per day, 2013-01-01 to 2013-09-18",
            "y": "meteorological season 0 to 3",
            "columns": "lanes of Y",
            "dates": "days",
            "season_names": "names of the seasons 0 to 3",
            "Y_2012": "bicycles per day, 2012-01-01 to 2012-11-05",
            "y_2012": "meteorological season 0 to 3",
            "columns_2012": "lanes of Y_2012",
            "dates_2012": "days",
            "Y_2015": "bicycles per day, 2015-01-01 to 2015-11-15 (one entry is 9999, probably a code for missing)",
            "y_2015": "meteorological season 0 to 3",
            "columns_2015": "lanes of Y_2015, from the public table (the file has no header)",
            "dates_2015": "days, assuming one row per day",
        },
        citation="Ville de Montréal, comptage vélo",
        licence="Ville de Montréal open data, CC BY 4.0 (recalled, not checked)",
        files=at("ipython-books/cookbook-data", "f9e3318e1e", "bikes.csv")
        + at("jvns/pandas-cookbook", "69d3389e4d", "cookbook/data/bikes.csv")
        + at(
            "Zv-842/Regression_Analysis_for_count_var",
            "4e709a14cdf176215be65877366fcfa760faee1d",
            "comptagesvelo2015.csv",
        ),
        parse=_parse_text.parse_montreal,
        sha256="f996841a2405acd0e9f8872569a361c00661b57e42400699721816860f3bbfef",
        digest="2fdd1e4c2019b078001113df1caf7770f9577b227d9cf6e839a4715898ab75ad",
    ),
    "newsgroups": Entry(
        description="20 Newsgroups (bydate), alt.atheism, comp.sys.mac.hardware and sci.med, as word counts.",
        units={
            "X": "counts of the words of the whole message with document frequency 10 % to 90 %",
            "vocabulary": "words of X",
            "y": "class 0, 1, 2",
            "class_names": "names of the classes",
            "doc_id": "original file numbers",
            "body_csr_data": "counts of the words of the body, CSR entries",
            "body_csr_indices": "CSR column indices",
            "body_csr_indptr": "CSR row pointers",
            "body_vocabulary": "words of the body counts",
        },
        citation="Lang, NewsWeeder, ICML (1995)",
        licence=_NO_LICENCE,
        files=at(
            "bahbbc/dataMining20NewsGroup",
            "1f791d180896b6be5b8529be0f9d135f5110dcca",
            "20news-bydate/20news-bydate-train/",
        ),
        parse=_parse_text.parse_newsgroups,
        sha256="7d1ffe82951f58a5b6a16d49a8125ed06195817a541aa903bdda5db948623c5a",
        digest="c638aedcb8fb4d1a363e5ac16f197845e02305ba133d2c72dddd7d583ffe8368",
    ),
    "yale": Entry(
        description="Yale faces: 15 people, 11 images each, 32 × 32 crops.",
        units={
            "X": "grey levels 0 to 255, 32 × 32 images by rows",
            "y": "person 0 to 14",
            "image_shape": "height and width [pixels]",
        },
        citation="Belhumeur, Hespanha, Kriegman, IEEE PAMI 19 (1997)",
        licence="non-commercial research use (recalled, not checked)",
        files=at("ma-xu/ORL3", "0efe9e8df8fd3642fbf1f5e258f51165e475b1f1", "Yale_32x32.mat"),
        parse=_parse_images.parse_yale,
        sha256="26f0fa74541c60ca5f5d0c4f7bc90d2b643ce9b8e44e56be2d30338b0348b365",
        digest="d5446f3c80673525c96c30c88173d2fff83caa018959b2109cb690f309329332",
    ),
    "cifar10_gray": Entry(
        description="CIFAR-10 in grey: all 50,000 training and the first 1,000 test images.",
        units={
            "X_train": "grey levels 0 to 255, 0.299 R + 0.587 G + 0.114 B rounded, 32 × 32 images by rows",
            "y_train": "class 0 to 9",
            "X_test": "as X_train",
            "y_test": "class 0 to 9",
            "class_names": "names of the classes",
            "image_shape": "height and width [pixels]",
        },
        citation=_CIFAR_CITATION,
        licence=_NO_LICENCE,
        files=at(*_CIFAR, *(f"demo/cifar10/cifar10_batch_{i}.png" for i in range(51)), _CIFAR_LABELS),
        parse=_parse_images.parse_cifar10_gray,
        sha256="815da2585fcb9a9531ff6318cb675963478b48ec4abb0f34c7cf5bcb196dbb40",
        digest="6b946def9abffbd3b42cdac3b095856ba968dd08fcda4f1d8ecc58aaab9a25f0",
    ),
    "cifar10_rgb5k": Entry(
        description="The first 5,000 CIFAR-10 training images in colour.",
        units={
            "X": "red, green and blue levels 0 to 255, 32 × 32 × 3 images",
            "y": "class 0 to 9",
            "class_names": "names of the classes",
        },
        citation=_CIFAR_CITATION,
        licence=_NO_LICENCE,
        files=at(*_CIFAR, *(f"demo/cifar10/cifar10_batch_{i}.png" for i in range(5)), _CIFAR_LABELS),
        parse=_parse_images.parse_cifar10_rgb5k,
        sha256="43d93770082b8536c1a6439d4b7832876fd99c1bba521105aae1bde87a110c31",
        digest="b65c74b35d19e24d6d62badc21b114e14b6305153ed6e56187ea626a1b938051",
    ),
    "congress109": Entry(
        description="109th US Congress: counts of 1,000 phrases for 529 members.",
        units={
            "X": "phrase counts; rows sorted by member name",
            "columns": "phrases",
            "y": "0 Republican, 1 other",
            "party": "R, D or I",
        },
        citation="Gentzkow and Shapiro, Econometrica 78 (2010); Taddy, textir",
        licence=_NO_LICENCE,
        files=at(*_RFLVM, "datasets/congress109.csv", "datasets/congress109members.csv"),
        parse=_parse_text.parse_congress109,
        sha256="80518b71dc3538fe4166aca712cc87978245f081d5049c4ba3b5d4fdae4d824e",
        digest="e5b047e9dab4bcb62bc1b725b6426432a7e3a6fac6774eb6044682d65de6be55",
    ),
}
