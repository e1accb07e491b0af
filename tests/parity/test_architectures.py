"""Models that are used past their root: encoders called alone, generate(), tied heads, methods that call submodules."""

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.support.trainers import Plain, assert_parity, assert_same_bits, follow, tiered, train

transformers = pytest.importorskip("transformers")

IDS = torch.arange(3, 19).view(2, 8)
SOUND = torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32)
HALF = torch.linspace(-1, 1, 64).view(2, 32)


def t5() -> nn.Module:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        )
    )


def whisper() -> nn.Module:
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=64,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=16,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )
    model.generation_config.max_length = None
    return model


class Autoencoder(nn.Module):
    """encode() and decode() are what users call; forward is both. `mean` is tied to a layer of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Sequential(nn.Linear(24, 16), nn.Tanh()))
        self.decoder = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 32))
        self.moments = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(8))

    def encode(self, x: Tensor) -> Tensor:
        mean, spread = self.moments(self.encoder(x)).chunk(2, dim=-1)
        return mean + spread.exp() * 0.5

    def decode(self, code: Tensor) -> Tensor:
        return self.decoder(code)

    def scaled(self, code: Tensor) -> Tensor:
        return code * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.decode(self.scaled(self.encode(x))) - x).square().mean()


def step(trainer, loss: Tensor) -> Tensor:
    trainer.backward(loss)
    trainer.step()
    return loss.detach()


def use_t5(trainer):
    model, seen = trainer.module, []
    for _ in range(2):
        seen.append(step(trainer, trainer(input_ids=IDS, labels=IDS).loss))
        model.eval()
        with torch.no_grad():
            seen += [model.encoder(IDS).last_hidden_state, model.lm_head(HALF), model.generate(IDS, max_new_tokens=4)]
        model.train()
        seen.append(step(trainer, model.encoder(IDS).last_hidden_state.square().mean() + model.lm_head(HALF).mean()))
    return seen


def use_gpt2(trainer):
    model, seen = trainer.module, []
    for _ in range(2):
        seen.append(step(trainer, model(input_ids=IDS, labels=IDS).loss))
        model.eval()
        seen.append(model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))
        seen.append(model.generate(IDS, max_new_tokens=3, num_beams=2, do_sample=False, pad_token_id=0))
        with torch.no_grad():
            seen += [model.transformer.h[0].mlp(HALF), model.lm_head(HALF), model.transformer.wte(IDS)]
        model.train()
        seen.append(
            step(trainer, model.lm_head(model.transformer.h[1].mlp(model.transformer.wte(IDS))).square().mean())
        )
    return seen


def use_whisper(trainer):
    model, seen = trainer.module, []
    for _ in range(2):
        seen.append(step(trainer, trainer(input_features=SOUND, labels=IDS).loss))
        model.eval()
        seen.append(model.generate(SOUND, max_new_tokens=4))
        model.train()
        seen.append(step(trainer, model.model.encoder(SOUND).last_hidden_state.square().mean()))
    return seen


def use_autoencoder(trainer):
    model, seen = trainer.module, []
    for _ in range(3):
        seen.append(step(trainer, trainer(HALF)))
        with torch.no_grad():
            seen += [model.encode(HALF), model.decode(HALF[:, :8]), model.encoder[2][0](HALF[:, :24])]
        seen.append(step(trainer, (model.decode(model.encode(HALF)) - HALF).square().mean()))
    return seen


CASES = {"t5": (t5, use_t5), "gpt2": (gpt2, use_gpt2), "whisper": (whisper, use_whisper)}
CASES["autoencoder"] = (Autoencoder, use_autoencoder)


@pytest.mark.filterwarnings("ignore")  # what transformers says of its own settings
@pytest.mark.parametrize("name", CASES)
def test_models_used_past_their_root_have_the_bits_of_plain_ones(name, swap_path):
    build, script = CASES[name]
    assert_parity(build, script, swap_path, clipping=0.5)


def test_a_method_that_reads_a_parameter_itself_says_what_to_do(swap_path):
    """No module's forward runs around it, so nothing says when the parameter may leave again."""
    code = HALF[:, :8]
    with tiered(Autoencoder(), swap_path) as engine:
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError, match=r"'scale'.*gathered.*forward"):
            engine.module.scaled(code)
        with tiered_zero.gathered(engine.module.scale):
            assert torch.equal(engine.module.scaled(code), code)
        train(engine, lambda _: (HALF,), 1)


def test_an_interrupt_inside_a_direct_call_leaves_nothing_open(swap_path):
    """torch runs no hook where an interrupt passes; the next call of the model, or of the engine, ends what it left."""

    class Interrupted(nn.Module):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise KeyboardInterrupt
            return x

    def build() -> nn.Module:
        model = Autoencoder()
        model.encoder[2].append(Interrupted())
        return model

    def script(trainer, way):
        seen = train(trainer, lambda _: (HALF,), 2)
        trainer.module.encoder[2][2].armed = True
        with pytest.raises(KeyboardInterrupt):
            (trainer.module if way == "root" else trainer.module.encoder)(*(HALF,))
        trainer.module.encoder[2][2].armed = False
        seen.append(trainer.module(HALF).detach() if way == "root" else trainer(HALF).detach())
        return seen + train(trainer, lambda _: (HALF,), 2)

    for way in ("root", "encoder"):
        expected = follow(lambda own, way=way: script(own, way), Plain(build(), clipping=0.5))
        engine = tiered(build(), swap_path, clipping=0.5)
        assert_same_bits(expected, follow(lambda own, way=way: script(own, way), engine))
