-- Change a slot's bit in some fields of one bucket; `change` is `with` or `without`. Fields that nobody holds any more go.
-- Stands behind `call` and bits.lua.
local function update(change, bucket, fields, byte, bit)
  local old = call('HMGET', bucket, unpack(fields))
  local put, gone = {}, {}
  for i, field in ipairs(fields) do
    local new = change(old[i], byte, bit)
    if not new then
      if old[i] then gone[#gone + 1] = field end
    elseif new ~= old[i] then
      put[#put + 1] = field
      put[#put + 1] = new
    end
  end
  if #put > 0 then call('HSET', bucket, unpack(put)) end
  if #gone > 0 then call('HDEL', bucket, unpack(gone)) end
end
