"""stanza: a tokenizer on packed characters, languages of strings, and an encoder of words with a decoder of cells."""

from __future__ import annotations

from typing import Any

import torch
from replaced import check


def test_tokenizer(package: Any):
    module = package("stanza.models.tokenization.model")
    torch.manual_seed(0)
    options = {"feat_dim": 3, "rnn_layers": 2, "conv_res": "1,5", "use_mwt": True, "hierarchical": True,
               "tok_noise": 0.0, "hier_invtemp": 0.5}
    model = module.Tokenizer(options, 30, 8, 12, 0.3, 0.1).eval()
    letters, features, lengths = torch.randint(1, 30, (3, 9)), torch.randn(3, 9, 3), torch.tensor([9, 6, 2])
    check(model, lambda model, cast: model(letters, cast(features), lengths), ("rnn", "rnn2"))


def test_language(package: Any):
    module = package("stanza.models.langid.model")
    torch.manual_seed(0)
    letters = {"<PAD>": 0, "UNK": 1, **{c: n for n, c in enumerate("abcdefgh", 2)}}
    model = module.LangIDBiLSTM(letters, {"en": 0, "de": 1, "fr": 2}, 2, 8, 12).eval()
    x = torch.randint(1, 10, (4, 11))
    check(model, lambda model, cast: model(x), ("lstm",))


def test_packed_layers(package: Any):
    module = package("stanza.models.common.packed_lstm")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layer": module.PackedLSTM(7, 11, 2, batch_first=True, bidirectional=True, pad=True)})
    x, lengths = torch.randn(4, 6, 7), torch.tensor([6, 5, 5, 1])
    check(model, lambda model, cast: model["layer"](cast(x), lengths), ("layer.lstm",))


def test_lemmas(package: Any):
    """An encoder, and a decoder that calls a cell for each letter."""
    module = package("stanza.models.common.seq2seq_model")
    torch.manual_seed(0)
    model = module.Seq2SeqModel({"vocab_size": 20, "emb_dim": 8, "hidden_dim": 16, "num_layers": 1, "dropout": 0.2,
                                 "max_dec_len": 10, "attn_type": "soft"}).eval()
    words, wanted = torch.randint(4, 20, (3, 6)), torch.randint(4, 20, (3, 5))
    padding = torch.arange(6)[None] >= torch.tensor([6, 4, 3])[:, None]
    words[padding] = 0
    check(model, lambda model, cast: model(words, padding, wanted)[0], ("encoder", "decoder.lstm_cell"))
