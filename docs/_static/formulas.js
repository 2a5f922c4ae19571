document.addEventListener("DOMContentLoaded", () => {
  const draw = (source, element) =>
    katex.render(source, element, { displayMode: element.tagName === "DIV", throwOnError: false, strict: false });
  for (const element of document.querySelectorAll(".math")) {
    const source = element.textContent;
    draw(source, element);
    // On a narrow screen the parts of a long formula stand below each other.
    if (element.tagName === "DIV" && element.scrollWidth > element.clientWidth && source.includes("\\qquad")) {
      draw(`\\begin{gathered}${source.split("\\qquad").join("\\\\[6pt]")}\\end{gathered}`, element);
    }
  }
});
