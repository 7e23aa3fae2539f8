#include <tessera/training/config/values/config_text.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>

namespace tessera::internal {

namespace {

/// Goes over the text once, and blanks out what JSON has not.
class Cleaner {
 public:
  Cleaner(const std::string& text, const std::string& source) : text_(text), source_(source) {}

  std::string run() {
    while (at_ < text_.size()) step();
    return text_;
  }

 private:
  void step() {
    const char c = text_[at_];
    if (c == '"') return skip_text();
    if (c == '#' || starts_with("//")) return blank_until(std::min(text_.find('\n', at_), text_.size()));
    if (starts_with("/*")) {
      const auto end = text_.find("*/", at_ + 2);
      TORCH_CHECK_VALUE(end != std::string::npos, source_, ": the comment that begins in line ", line(), " does not end");
      return blank_until(end + 2);
    }
    if (c == ',') last_comma_ = at_;
    if ((c == '}' || c == ']') && last_comma_ != std::string::npos) text_[last_comma_] = ' ';
    if (c != ',' && !std::isspace(static_cast<unsigned char>(c))) last_comma_ = std::string::npos;
    ++at_;
  }

  bool starts_with(const char* what) const { return text_.compare(at_, 2, what) == 0; }

  void skip_text() {
    last_comma_ = std::string::npos;
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') ++at_;
    }
    ++at_;
  }

  void blank_until(size_t end) {
    for (; at_ < end; ++at_) {
      if (text_[at_] != '\n') text_[at_] = ' ';
    }
  }

  int64_t line() const { return 1 + std::count(text_.begin(), text_.begin() + static_cast<int64_t>(at_), '\n'); }

  std::string text_;
  const std::string& source_;
  size_t at_ = 0;
  size_t last_comma_ = std::string::npos; // with nothing after it
};

} // namespace

std::string plain_json(const std::string& text, const std::string& source) { return Cleaner(text, source).run(); }

Json parse_config(const std::string& text, const std::string& source) {
  const auto plain = plain_json(text, source);
  const auto first = std::find_if_not(plain.begin(), plain.end(), [](unsigned char c) { return std::isspace(c); });
  TORCH_CHECK_VALUE(first != plain.end(), source, ": the config is empty");
  TORCH_CHECK_VALUE(*first == '{', source, ": a config is a JSON object, which begins with '{'. Where this is a YAML file of ",
                    "Accelerate's, convert it: tessera-config convert ", source, " > config.json");
  return parse_json(plain, source);
}

} // namespace tessera::internal
