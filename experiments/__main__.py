"""``python -m experiments NAME``: rebuild a published table."""

from matbackprop.cli import Command, main

SUMMARIES = {
    "table1": "The paper's first table: region classification.",
    "table2": "The paper's second table: full-image segmentation.",
    "backbones": "Region classification by first and second order on several backbones.",
    "bsds500": "Contours and regions on BSDS500, compared with published methods.",
    "cuts": "Contour hierarchies with spectral distances, trained through the eigenvectors.",
    "joint": "Contour networks trained jointly with a normalized-cut objective.",
    "refinement": "Borders of a 12-megapixel photograph, enlarged and refined.",
    "baselines": "Methods of table 2 without training, and human agreement.",
}
COMMANDS = {
    name: Command(
        f"experiments.{name}", summary, stopped="stopped; finished runs are kept. Rerun the command to resume."
    )
    for name, summary in SUMMARIES.items()
}

if __name__ == "__main__":
    main(commands=COMMANDS, prog="python -m experiments")
