#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/json.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <type_traits>

namespace tessera::internal {

namespace {

constexpr size_t kMaxDepth = 16;

// What the parser itself lets pass: keys that appear twice, and deep nesting. A pass of its own, because a callback makes the
// parser go over a whole array or object at the end of each of its items.
class Checker : public nlohmann::json_sax<Json> {
 public:
  explicit Checker(const std::string& source) : source_(source) {}

  bool start_object(size_t /*size*/) override { return open(); }
  bool start_array(size_t /*size*/) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& key) override {
    TORCH_CHECK(keys_.back().insert(key).second, source_, ": key \"", key, "\" appears twice");
    return true;
  }
  bool null() override { return true; }
  bool boolean(bool /*value*/) override { return true; }
  bool number_integer(int64_t /*value*/) override { return true; }
  bool number_unsigned(uint64_t /*value*/) override { return true; }
  bool number_float(double /*value*/, const std::string& /*text*/) override { return true; }
  bool string(std::string& /*value*/) override { return true; }
  bool binary(Json::binary_t& /*value*/) override { return true; }
  bool parse_error(size_t /*position*/, const std::string& /*token*/, const Json::exception& error) override {
    TORCH_CHECK(false, source_, ": not valid JSON: ", error.what());
  }

 private:
  bool open() {
    TORCH_CHECK(keys_.size() < kMaxDepth, source_, ": JSON nested deeper than ", kMaxDepth);
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string& source_;
  std::vector<std::set<std::string>> keys_; // of the open objects; none for an array
};

Json number_to_json(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

double number_from_json(const JsonView& json) {
  if (!json.json().is_string()) return json.number();
  const auto& text = json.string();
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  json.fail("is not a number");
}

template <typename Read>
auto list(const JsonView& json, Read read) {
  std::vector<std::decay_t<decltype(read(json))>> values;
  for (const auto& element : json.elements()) values.push_back(read(element));
  return values;
}

} // namespace

Json parse_json(std::string_view text, const std::string& source) {
  Checker checker(source);
  Json::sax_parse(text.begin(), text.end(), &checker);
  auto json = Json::parse(text.begin(), text.end());
  TORCH_CHECK(json.is_object(), source, ": not a JSON object");
  return json;
}

std::string dump_json(const Json& json, const std::string& source) {
  try {
    return json.dump();
  } catch (const Json::exception& error) {
    TORCH_CHECK(false, source, ": cannot be written as JSON: ", error.what());
  }
}

void JsonView::fail(const std::string& problem) const { TORCH_CHECK(false, where_, " ", problem); }

JsonView JsonView::operator[](const std::string& key) const {
  if (!json_->is_object()) fail("is not an object");
  const auto found = json_->find(key);
  if (found == json_->end()) fail("lacks the field \"" + key + "\"");
  return {*found, where_ + "." + key};
}

std::vector<JsonView> JsonView::elements() const {
  if (!json_->is_array()) fail("is not an array");
  std::vector<JsonView> views;
  views.reserve(json_->size());
  for (size_t i = 0; i < json_->size(); ++i) views.emplace_back((*json_)[i], where_ + "[" + std::to_string(i) + "]");
  return views;
}

std::vector<std::pair<std::string, JsonView>> JsonView::fields() const {
  if (!json_->is_object()) fail("is not an object");
  std::vector<std::pair<std::string, JsonView>> views;
  for (const auto& [key, value] : json_->items()) views.emplace_back(key, JsonView(value, where_ + "." + key));
  return views;
}

const std::string& JsonView::string() const {
  if (!json_->is_string()) fail("is not a string");
  return json_->get_ref<const std::string&>();
}

bool JsonView::boolean() const {
  if (!json_->is_boolean()) fail("is not true or false");
  return json_->get<bool>();
}

double JsonView::number() const {
  if (!json_->is_number()) fail("is not a number");
  return json_->get<double>();
}

int64_t JsonView::integer() const {
  const bool fits = json_->is_number_unsigned() ? json_->get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()}
                                                : json_->is_number_integer();
  if (!fits) fail("is not a 64-bit integer");
  return json_->get<int64_t>();
}

int64_t JsonView::non_negative() const {
  const auto value = integer();
  if (value < 0) fail("is negative");
  return value;
}

std::vector<int64_t> JsonView::non_negatives() const { return list(*this, std::mem_fn(&JsonView::non_negative)); }

std::vector<std::string> JsonView::strings() const { return list(*this, std::mem_fn(&JsonView::string)); }

Json to_json(const StateValue& value) {
  return std::visit(
      [](const auto& v) -> Json {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, bool>) return {{"bool", v}};
        if constexpr (std::is_same_v<T, int64_t>) return {{"i64", v}};
        if constexpr (std::is_same_v<T, double>) return {{"f64", number_to_json(v)}};
        if constexpr (std::is_same_v<T, std::string>) return {{"string", v}};
        if constexpr (std::is_same_v<T, std::vector<int64_t>>) return {{"i64[]", v}};
        if constexpr (std::is_same_v<T, std::vector<std::string>>) return {{"string[]", v}};
        if constexpr (std::is_same_v<T, std::vector<double>>) {
          auto numbers = Json::array();
          for (const auto number : v) numbers.push_back(number_to_json(number));
          return {{"f64[]", std::move(numbers)}};
        }
      },
      value);
}

StateValue state_value_from_json(const JsonView& json) {
  const auto fields = json.fields();
  if (fields.size() != 1) json.fail("is not a value with one type");
  const auto& [type, value] = fields.front();
  if (type == "bool") return value.boolean();
  if (type == "i64") return value.integer();
  if (type == "f64") return number_from_json(value);
  if (type == "string") return value.string();
  if (type == "i64[]") return list(value, std::mem_fn(&JsonView::integer));
  if (type == "f64[]") return list(value, number_from_json);
  if (type == "string[]") return value.strings();
  json.fail("has the unknown type \"" + type + "\"");
}

std::string to_text(const Json& json) {
  return json.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

bool is_same(const StateValue& a, const StateValue& b) { return to_json(a) == to_json(b); }

} // namespace tessera::internal
