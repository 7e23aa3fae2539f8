# Helpers that give every target of the project the same warnings, sanitizers and output folder.

add_library(tessera_options INTERFACE)
target_compile_features(tessera_options INTERFACE cxx_std_20)
target_compile_options(tessera_options INTERFACE -Wall -Wextra -Werror -Wno-unused-parameter -Wnon-virtual-dtor
  -Woverloaded-virtual -Wno-missing-field-initializers)
if(TESSERA_SANITIZER)
  target_compile_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZER} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZER})
endif()

# tessera_program(NAME SOURCES file... [LIBRARIES target...]): a program in build/<preset>/bin.
function(tessera_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tessera::tessera tessera_options ${arg_LIBRARIES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
endfunction()
