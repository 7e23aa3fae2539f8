#include <tessera/training/own_settings.h>

#include <c10/util/Exception.h>

#include <type_traits>

#include <tessera/training/config/values/config_values.h>

namespace tessera {

namespace {

using internal::KeyType;

template <typename T>
constexpr KeyType type_for() {
  if constexpr (std::is_same_v<T, bool>) return KeyType::kBoolean;
  if constexpr (std::is_same_v<T, int64_t>) return KeyType::kInteger;
  if constexpr (std::is_same_v<T, double>) return KeyType::kNumber;
  if constexpr (std::is_same_v<T, std::string>) return KeyType::kText;
  if constexpr (std::is_same_v<T, std::vector<int64_t>>) return KeyType::kNumbers;
  return KeyType::kTexts;
}

} // namespace

OwnSettings::OwnSettings(const std::string& json, std::string where) : where_(std::move(where)) {
  const auto block = internal::Json::parse(json);
  for (const auto& [name, value] : block.items()) values_[name] = value.dump();
}

template <typename T>
OwnSettings& OwnSettings::read_as(const std::string& name, T& value) {
  read_.insert(name);
  const auto found = values_.find(name);
  if (found == values_.end()) return *this;
  const internal::ConfigKey key{name, type_for<T>(), "", internal::KeyEffect::kUsed, ""};
  value = internal::as_type(key, internal::Json::parse(found->second), where_ + '.' + name).template get<T>();
  return *this;
}

OwnSettings& OwnSettings::read(const std::string& name, int64_t& value) { return read_as(name, value); }
OwnSettings& OwnSettings::read(const std::string& name, double& value) { return read_as(name, value); }
OwnSettings& OwnSettings::read(const std::string& name, bool& value) { return read_as(name, value); }
OwnSettings& OwnSettings::read(const std::string& name, std::string& value) { return read_as(name, value); }
OwnSettings& OwnSettings::read(const std::string& name, std::vector<int64_t>& value) { return read_as(name, value); }
OwnSettings& OwnSettings::read(const std::string& name, std::vector<std::string>& value) { return read_as(name, value); }

void OwnSettings::check_all_read() const {
  const std::vector<std::string> names(read_.begin(), read_.end());
  for (const auto& [name, value] : values_) {
    TORCH_CHECK_VALUE(read_.count(name) != 0, where_, ": the program knows no key ", name, internal::nearest_name(name, names));
  }
}

} // namespace tessera
