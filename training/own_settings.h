#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera {

/// A block of a config that belongs to the program, such as the sizes of its model:
///
///   struct ModelOptions {
///     int64_t layers = 12, width = 768;
///     void read(tessera::OwnSettings& settings) { settings.read("layers", layers).read("width", width); }
///   };
///   const auto options = config.own<ModelOptions>("model");
///
/// A key that the file does not have leaves the value as it is. Errors name the file and the key: a value of another type.
class OwnSettings {
 public:
  /// `json` is an object.
  OwnSettings(const std::string& json, std::string where);

  OwnSettings& read(const std::string& name, int64_t& value);
  OwnSettings& read(const std::string& name, double& value);
  OwnSettings& read(const std::string& name, bool& value);
  OwnSettings& read(const std::string& name, std::string& value);
  OwnSettings& read(const std::string& name, std::vector<int64_t>& value);
  OwnSettings& read(const std::string& name, std::vector<std::string>& value);

  /// An error for the first key that nobody has read, with the nearest name that somebody has.
  void check_all_read() const;

 private:
  template <typename T>
  OwnSettings& read_as(const std::string& name, T& value);

  std::string where_;
  std::map<std::string, std::string> values_; ///< JSON
  std::set<std::string> read_;
};

} // namespace tessera
