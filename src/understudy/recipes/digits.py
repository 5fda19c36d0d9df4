"""The recipes of `digits` and `digits-12`: small ViTs on handwritten digits."""

from __future__ import annotations

from understudy.inputs.digits import digits, training_digits
from understudy.inputs.pictures import Pictures
from understudy.recipes.vit import VitRecipe

DATA = Pictures(
    name="digits",
    training=training_digits(),
    held_out=digits(),
    side=8,
    channels=1,
    classes=tuple("0123456789"),
    about=(
        "The 1,797 images of scikit-learn's `load_digits`, a copy of the test set of the UCI data set *Optical "
        "Recognition of Handwritten Digits* (E. Alpaydin, C. Kaynak; CC BY 4.0). Every third image is held out: never "
        "trained on, and the input of `understudy.digits()`."
    ),
    title="scikit-learn's handwritten digits",
)

DIGITS = VitRecipe("digits", DATA, heads=6, head_width=8)
DIGITS_12 = VitRecipe("digits-12", DATA, heads=12, head_width=6)
