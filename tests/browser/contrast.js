// The lowest contrast between a visible text and what it stands on, and where that is.
// Source: WCAG 2.2, "contrast ratio" and "relative luminance".
(() => {
  const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
  const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = ([red, green, blue]) =>
    0.2126 * linear(red / 255) + 0.7152 * linear(green / 255) + 0.0722 * linear(blue / 255);

  function behind(element) {
    for (; element; element = element.parentElement) {
      const colour = channels(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  }

  function contrast(element) {
    const text = luminance(channels(getComputedStyle(element).color)), ground = luminance(behind(element));
    return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
  }

  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  const hidden = ["SCRIPT", "STYLE", "OPTION"];
  return [...document.querySelectorAll("body *")]
    .filter((element) => !hidden.includes(element.tagName) && element.checkVisibility() && hasText(element))
    .map((element) => [contrast(element), `${element.tagName}: ${element.textContent.slice(0, 40)}`])
    .sort((one, other) => one[0] - other[0])[0];
})()
