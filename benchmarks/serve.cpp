#include "serve.h"

#include <c10/util/Exception.h>

#include <iostream>

namespace tessera::benchmarks {

void serve(const Commands& commands) {
  std::cout << "ready" << std::endl;
  for (std::string name; std::getline(std::cin, name);) {
    const auto command = commands.find(name);
    TORCH_CHECK(command != commands.end(), "there is no command '", name, "'");
    std::cout << command->second().dump() << std::endl;
  }
}

} // namespace tessera::benchmarks
